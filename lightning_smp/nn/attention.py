"""Multi-head attention whose heads are split over a tensor group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.nn.functional import add_residual, alibi_slopes, attention_bias, dropout
from lightning_smp.nn.layer_norm import layer_norm
from lightning_smp.nn.linear import ColumnLinear, RowLinear
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.record import split_sizes

__all__ = ["DistributedAttentionLayer", "everybodys_mask"]


class DistributedAttentionLayer(DistributedModule):
    """Attention with residual and layer norms, each rank computing some of the heads.

    ``forward((hidden, mask))``, or with cross attention ``forward((hidden, cross_states, mask))``,
    gives a tensor like hidden [B, S, H]. The mask is added to the scores and broadcasts to
    [B, heads, S, S], such as [B, 1, 1, S]; it may be None.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
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
        """Starts with torch's default distribution, or a normal one.

        Args:
            num_attention_heads: of all ranks together.
            attention_head_size: channels of a head.
            hidden_size: H.
            attention_dropout_prob: of attention weights.
            hidden_dropout_prob: of the result, before the residual is added.
            layernorm_epsilon: of the layer norms.
            initializer_range: deviation of a normal distribution.
            use_normal_initialization: start with that; else with torch's default.
            cross_attention: keys and values come from other states than queries.
            causal_mask_size: longest sequence of causal attention; None: not causal.
            pre_layernorm: norm the input of the attention.
            post_layernorm: norm the sum of result and residual.
            use_alibi: add a linear bias per head.
            alibi_bias_max: exponent of its smallest slope.
            scale_attention_scores: divide scores by sqrt(attention_head_size).
            scale_attn_by_layer_idx: divide them by `layer_idx` + 1 as well.
            layer_idx: position of the layer, from 0.
            attention_in_fp32: compute scores and weights in float32.
            fp32_residual_addition: add the residual in float32.
            tp: the tensor group; by default that of the run.
            is_inside: hidden states are in the layout between split operations already.

        Raises:
            ConfigError: fewer heads than ranks, or no layer norm at all.
        """
        super().__init__(tp=tp)
        _check(num_attention_heads, self.tp, pre_layernorm, post_layernorm)
        layout = Layout(self.tp, hidden_size)
        std = initializer_range if use_normal_initialization else None
        size = num_attention_heads * attention_head_size
        unit = attention_head_size
        self.layout = layout
        self.is_inside = is_inside
        self.cross_attention = cross_attention
        self.attention_head_size = attention_head_size
        self.causal_mask_size = causal_mask_size
        self.attention_in_fp32 = attention_in_fp32
        self.fp32_residual_addition = fp32_residual_addition
        self.scale = attention_head_size**-0.5 if scale_attention_scores else 1.0
        if scale_attn_by_layer_idx:
            self.scale /= layer_idx + 1
        self.query = ColumnLinear(hidden_size, size, tp=self.tp, std=std, unit=unit)
        self.key = ColumnLinear(hidden_size, size, tp=self.tp, std=std, unit=unit)
        self.value = ColumnLinear(hidden_size, size, tp=self.tp, std=std, unit=unit)
        self.dense = RowLinear(size, layout, std=std, unit=unit)
        self.dropout1 = nn.Dropout(attention_dropout_prob)
        self.dropout2 = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = layer_norm(layout, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = layer_norm(layout, layernorm_epsilon) if post_layernorm else None
        slopes = alibi_slopes(num_attention_heads, alibi_bias_max) if use_alibi else None
        own = split_sizes(num_attention_heads, self.tp.size)
        self.slopes = None if slopes is None else slopes.split(own)[self.tp.rank].tolist()

    def forward(self, inputs: Sequence[Tensor | None]) -> Tensor:
        """Return the attention of own samples. Collective over tp."""
        hidden, *cross, mask = inputs
        assert hidden is not None
        memory = cross[0] if cross else None
        if self.cross_attention != (memory is not None):
            raise UnsupportedError(
                f"a DistributedAttentionLayer with cross_attention={self.cross_attention} was "
                f"called with {len(inputs)} inputs; it takes (hidden, mask), or with cross "
                "attention (hidden, cross_states, mask)."
            )
        if self.is_inside:
            return self._attend(hidden, memory, mask)
        mask = everybodys_mask(mask, hidden, self.layout)
        memory = None if memory is None else self.layout.enter(memory)
        result: Tensor = self._attend(self.layout.enter(hidden), memory, mask)
        return self.layout.leave(result)

    def _attend(self, hidden: Tensor, memory: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        own = self.layout.to_columns(normed)
        other = own if memory is None else self.layout.to_columns(memory)
        query, key, value = self.query(own), self.key(other), self.value(other)
        dtype = query.dtype
        if self.attention_in_fp32 and dtype != torch.float64:
            query, key, value = query.float(), key.float(), value.float()
        context = self._context(self._heads(query), self._heads(key), self._heads(value), mask)
        result: Tensor = self.dense(context.transpose(1, 2).flatten(2).to(dtype))
        result = dropout(self, result, self.dropout2.p, sliced=self.layout.is_sliced)
        result = add_residual(result, hidden, in_fp32=self.fp32_residual_addition)
        if self.layernorm is not None:
            result = self.layernorm(result)
        return result

    def _heads(self, x: Tensor) -> Tensor:
        """From [B', S, channels] to [B', heads, S, D]."""
        heads: Tensor = x.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
        return heads

    def _context(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_causal = self.causal_mask_size is not None and not self.cross_attention
        if is_causal and query.shape[2] > (self.causal_mask_size or 0):
            raise UnsupportedError(
                f"a sequence of {query.shape[2]} positions for causal_mask_size="
                f"{self.causal_mask_size}. Give the largest length at construction."
            )
        slopes = None if self.slopes is None else query.new_tensor(self.slopes)
        bias = attention_bias(mask, query, key, is_causal=is_causal, slopes=slopes)
        p = self.dropout1.p if self.training else 0.0
        if p == 0.0:
            return self._scores(query, key, value, bias, 0.0, is_causal)
        with self.draws(query.device, sliced=True):
            return self._scores(query, key, value, bias, p, is_causal)

    def _scores(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float,
        is_causal: bool,
    ) -> Tensor:  # fmt: skip
        return F.scaled_dot_product_attention(
            query, key, value, bias, p, is_causal=is_causal and bias is None, scale=self.scale
        )


def everybodys_mask(mask: Tensor | None, hidden: Tensor, layout: Layout) -> Tensor | None:
    """Return the mask for everybody's samples; one that is the same for all samples stays."""
    if mask is None or mask.dim() < 4 or mask.shape[0] != hidden.shape[0]:
        return mask
    return layout.everybody(mask)


def _check(heads: int, tp: TensorParallel, pre_layernorm: bool, post_layernorm: bool) -> None:
    if heads < tp.size:
        raise ConfigError(
            f"num_attention_heads={heads} cannot be split over {tp.size} ranks; it must be at "
            "least their number"
        )
    if not (pre_layernorm or post_layernorm):
        raise ConfigError(
            "pre_layernorm=False and post_layernorm=False: one of them must be True. Use "
            "pre_layernorm=True for models like GPT-2, post_layernorm=True for models like BERT."
        )
