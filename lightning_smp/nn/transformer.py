"""Transformer layers and stacks of them, split over a tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.nn.attention import DistributedAttentionLayer, everybodys_mask
from lightning_smp.nn.layer_norm import layer_norm
from lightning_smp.nn.output_layer import DistributedTransformerOutputLayer
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = ["DistributedTransformer", "DistributedTransformerLayer", "Entry", "Exit"]


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross attention if asked for, and the feed-forward half.

    ``forward((hidden, mask))`` gives ``(hidden, mask)``; with cross attention
    ``forward((hidden, cross_states, mask, cross_mask))`` gives the same four. Only hidden changes,
    so that layers can follow each other in `nn.Sequential`. Masks are added to the scores.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int = 0,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        *,
        tp: TensorParallel | None = None,
        is_inside: bool = False,
    ) -> None:
        """Arguments are those of `DistributedAttentionLayer` and the output layer.

        Args:
            num_attention_heads: of all ranks together.
            attention_head_size: channels of a head.
            hidden_size: H.
            intermediate_size: inner channels of the feed-forward half.
            attention_dropout_prob: of attention weights.
            hidden_dropout_prob: of each half's result.
            activation: of the feed-forward half.
            layernorm_epsilon: of the layer norms.
            initializer_range: deviation of a normal distribution.
            use_normal_initialization: start with that; else with torch's default.
            causal_mask_size: longest sequence of causal attention; None: not causal.
            add_cross_attention: attend to other states between the halves.
            pre_layernorm: norm the inputs of the halves.
            post_layernorm: norm the sums with the residuals.
            use_alibi: add a linear bias per head.
            alibi_bias_max: exponent of its smallest slope.
            scale_attention_scores: divide scores by sqrt(attention_head_size).
            scale_attn_by_layer_idx: divide them by `layer_idx` + 1 as well.
            layer_idx: position of the layer, from 0.
            attention_in_fp32: compute scores and weights in float32.
            fp32_residual_addition: add residuals in float32.
            tp: the tensor group; by default that of the run.
            is_inside: hidden states are in the layout between split operations already.

        Raises:
            ConfigError: fewer heads than ranks, an unknown activation, or no layer norm at all.
        """
        super().__init__(tp=tp)
        self.layout = Layout(self.tp, hidden_size)
        self.is_inside = is_inside
        common: dict[str, Any] = {
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
            "fp32_residual_addition": fp32_residual_addition,
            "hidden_size": hidden_size,
            "tp": self.tp,
            "is_inside": True,
        }
        attention: dict[str, Any] = {
            **common,
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "scale_attention_scores": scale_attention_scores,
            "scale_attn_by_layer_idx": scale_attn_by_layer_idx,
            "layer_idx": layer_idx,
            "attention_in_fp32": attention_in_fp32,
        }
        self.attention = DistributedAttentionLayer(
            causal_mask_size=causal_mask_size, use_alibi=use_alibi, alibi_bias_max=alibi_bias_max,
            **attention,
        )  # fmt: skip
        self.cross_attention = (
            DistributedAttentionLayer(cross_attention=True, **attention)
            if add_cross_attention
            else None
        )
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **common
        )

    def forward(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the inputs with new hidden states. Collective over tp."""
        _check_inputs(self, inputs, self.cross_attention is not None)
        if self.is_inside:
            return (self._run(*inputs), *inputs[1:])
        entered = _enter(inputs, self.layout)
        return (self.layout.leave(self._run(*entered)), *inputs[1:])

    def _run(self, hidden: Any, *others: Any) -> Tensor:
        if self.cross_attention is None:
            hidden = self.attention((hidden, *others))
        else:
            memory, mask, cross_mask = others
            hidden = self.attention((hidden, mask))
            hidden = self.cross_attention((hidden, memory, cross_mask))
        result: Tensor = self.output(hidden)
        return result


class DistributedTransformer(DistributedModule):
    """A stack of transformer layers; inputs and outputs are those of one layer.

    Samples are exchanged once for the whole stack. With both layer norms, its input and output are
    normed as well.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tp: TensorParallel | None = None,
        is_inside: bool = False,
        **layer_arguments: Any,
    ) -> None:
        """Arguments are those of `DistributedTransformerLayer`, and the number of layers.

        Args:
            num_layers: number of layers.
            num_attention_heads: of all ranks together.
            attention_head_size: channels of a head.
            hidden_size: H.
            intermediate_size: inner channels of the feed-forward halves.
            attention_dropout_prob: of attention weights.
            hidden_dropout_prob: of each half's result.
            activation: of the feed-forward halves.
            layernorm_epsilon: of the layer norms.
            initializer_range: deviation of a normal distribution.
            use_normal_initialization: start with that; else with torch's default.
            causal_mask_size: longest sequence of causal attention; None: not causal.
            add_cross_attention: attend to other states in each layer.
            pre_layernorm: norm the inputs of the halves.
            post_layernorm: norm the sums with the residuals.
            tp: the tensor group; by default that of the run.
            is_inside: hidden states are in the layout between split operations already.
            layer_arguments: further arguments of the layers (`use_alibi` and so on).

        Raises:
            ConfigError: as of a layer.
        """
        super().__init__(tp=tp)
        self.layout = Layout(self.tp, hidden_size)
        self.add_cross_attention = add_cross_attention
        has_both = pre_layernorm and post_layernorm
        self.entry = None if is_inside else Entry(self.layout)
        self.input_layernorm = layer_norm(self.layout, layernorm_epsilon) if has_both else None
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    num_attention_heads, attention_head_size, hidden_size, intermediate_size,
                    attention_dropout_prob, hidden_dropout_prob, activation, layernorm_epsilon,
                    initializer_range, use_normal_initialization, causal_mask_size,
                    add_cross_attention, pre_layernorm, post_layernorm, tp=self.tp, is_inside=True,
                    **{"layer_idx": index, **layer_arguments},
                )
                for index in range(num_layers)
            )
        )  # fmt: skip
        self.output_layernorm = layer_norm(self.layout, layernorm_epsilon) if has_both else None
        self.exit = None if is_inside else Exit(self.layout)

    def forward(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the inputs with new hidden states. Collective over tp."""
        _check_inputs(self, inputs, self.add_cross_attention)
        hidden, *others = inputs
        if self.entry is not None:
            others = _enter_others(hidden, others, self.layout)
            hidden = self.entry(hidden)
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        hidden = self.seq_layers((hidden, *others))[0]
        if self.output_layernorm is not None:
            hidden = self.output_layernorm(hidden)
        if self.exit is not None:
            hidden = self.exit(hidden)
        return (hidden, *inputs[1:])


class Entry(nn.Module):
    """Takes own samples into the layout between split operations."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """From own samples to the layout inside. Collective over tp."""
        return self.layout.enter(x)


class Exit(Entry):
    """Gives own samples back."""

    def forward(self, x: Tensor) -> Tensor:
        """From the layout inside to own samples. Collective over tp."""
        return self.layout.leave(x)


def _enter(inputs: Sequence[Tensor | None], layout: Layout) -> list[Tensor | None]:
    hidden, *others = inputs
    assert hidden is not None
    return [layout.enter(hidden), *_enter_others(hidden, others, layout)]


def _enter_others(hidden: Any, others: list[Any], layout: Layout) -> list[Tensor | None]:
    """Bring masks and cross states to everybody."""
    if len(others) == 1:
        return [everybodys_mask(others[0], hidden, layout)]
    memory, *masks = others
    return [layout.enter(memory), *(everybodys_mask(mask, hidden, layout) for mask in masks)]


def _check_inputs(module: nn.Module, inputs: Any, has_cross_attention: bool) -> None:
    wanted = 4 if has_cross_attention else 2
    if not isinstance(inputs, (tuple, list)) or len(inputs) != wanted:
        raise UnsupportedError(
            f"{type(module).__name__} was called with "
            f"{len(inputs) if isinstance(inputs, (tuple, list)) else type(inputs).__name__}; it "
            "takes one tuple (hidden_states, attention_mask), or with cross attention "
            "(hidden_states, cross_states, attention_mask, cross_mask)."
        )
