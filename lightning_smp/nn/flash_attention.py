"""Attention over packed queries, keys and values, without the matrix of scores in memory."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp.errors import ConfigError
from lightning_smp.nn.functional import alibi_slopes, attention_bias

__all__ = ["FlashAttentionLayer"]


class FlashAttentionLayer(nn.Module):
    """Scaled dot-product attention by torch's fused kernels.

    It has no parameters, and works on the heads it is given: nothing here is split over ranks.

    Args:
        attention_dropout_prob: share of the attention weights that is dropped in training.
        attention_head_size: size D of a head; needed for the scale unless that is given.
        scale_attention_scores: whether scores are divided by sqrt(D).
        scale_attn_by_layer_idx: whether they are divided by ``layer_idx + 1`` too.
        layer_idx: of the layer, from 0; needed by the former.
        scale: factor of the scores, instead of what the arguments before say.
        triton_flash_attention: accepted; torch chooses the kernel.
        use_alibi: whether a linear bias per head is added (see `alibi_slopes`; its largest
            exponent is 8, as in the paper).

    Raises:
        ConfigError: the scale cannot be computed from what is given.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if scale is None and scale_attention_scores and attention_head_size is None:
            raise ConfigError(
                "FlashAttentionLayer(scale_attention_scores=True) needs attention_head_size or "
                "scale."
            )
        if scale is None and scale_attn_by_layer_idx and layer_idx is None:
            raise ConfigError(
                "FlashAttentionLayer(scale_attn_by_layer_idx=True) needs layer_idx or scale."
            )
        self.attention_dropout_prob = attention_dropout_prob
        self.use_alibi = use_alibi
        if scale is None:
            scale = 1.0
            if scale_attention_scores and attention_head_size is not None:
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx and layer_idx is not None:
                scale /= layer_idx + 1
        self.scale = scale

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attends.

        Args:
            qkv: queries, keys and values [B, S, 3, heads, D].
            attn_mask: added to the scores [B, 1, 1, S].
            causal: whether a position sees only itself and those before.

        Returns:
            [B, heads, S, D].
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        slopes = alibi_slopes(query.shape[1], 8).to(qkv.device) if self.use_alibi else None
        bias = attention_bias(attn_mask, query, key, is_causal=causal, slopes=slopes)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=causal and bias is None, scale=self.scale,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
        )  # fmt: skip
