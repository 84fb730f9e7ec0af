"""The feed-forward half of a transformer layer, its inner channels split over a tensor group."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_smp.errors import ConfigError
from lightning_smp.nn.functional import activation_function, add_residual, dropout
from lightning_smp.nn.layer_norm import layer_norm
from lightning_smp.nn.linear import ColumnLinear, RowLinear
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = ["DistributedTransformerOutputLayer"]


class DistributedTransformerOutputLayer(DistributedModule):
    """Two linear layers with residual and layer norms; hidden [B, S, H] in and out."""

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        *,
        tp: TensorParallel | None = None,
        is_inside: bool = False,
    ) -> None:
        """Starts with torch's default distribution, or a normal one.

        Args:
            hidden_size: H.
            intermediate_size: channels between the two linear layers.
            hidden_dropout_prob: of the result, before the residual is added.
            activation: "gelu", "gelu_new" (its tanh form) or "relu".
            layernorm_epsilon: of the layer norms.
            initializer_range: deviation of a normal distribution.
            use_normal_initialization: start with that; else with torch's default.
            pre_layernorm: norm the input.
            post_layernorm: norm the sum of result and residual.
            fp32_residual_addition: add the residual in float32.
            tp: the tensor group; by default that of the run.
            is_inside: hidden states are in the layout between split operations already.

        Raises:
            ConfigError: an unknown activation, or no layer norm at all.
        """
        super().__init__(tp=tp)
        if not (pre_layernorm or post_layernorm):
            raise ConfigError(
                "pre_layernorm=False and post_layernorm=False: one of them must be True."
            )
        layout = Layout(self.tp, hidden_size)
        std = initializer_range if use_normal_initialization else None
        self.layout = layout
        self.is_inside = is_inside
        self.fp32_residual_addition = fp32_residual_addition
        self.activation = activation_function(activation)
        self.dense1 = ColumnLinear(hidden_size, intermediate_size, tp=self.tp, std=std)
        self.dense2 = RowLinear(intermediate_size, layout, std=std)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = layer_norm(layout, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = layer_norm(layout, layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output for own samples. Collective over tp."""
        if self.is_inside:
            return self._feed(hidden)
        return self.layout.leave(self._feed(self.layout.enter(hidden)))

    def _feed(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        inner = self.activation(self.dense1(self.layout.to_columns(normed)))
        result = self.dense2(inner)
        result = dropout(self, result, self.dropout.p, sliced=self.layout.is_sliced)
        result = add_residual(result, hidden, in_fp32=self.fp32_residual_addition)
        return result if self.layernorm is None else self.layernorm(result)
