"""Attention over packed tensors against the formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_smp.errors import ConfigError
from lightning_smp.nn import FlashAttentionLayer
from lightning_smp.nn.functional import alibi_slopes

B, S, HEADS, D = 2, 6, 4, 8


def expected(qkv: Tensor, mask: Tensor | None, causal: bool, scale: float, alibi: bool) -> Tensor:
    query, key, value = (qkv[:, :, k].transpose(1, 2) for k in range(3))
    scores = query @ key.transpose(-1, -2) * scale
    if alibi:
        distance = torch.arange(S)[None] - torch.arange(S)[:, None]
        scores = scores + alibi_slopes(HEADS, 8).double()[:, None, None] * distance
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("arguments", "scale", "alibi"),
    [
        ({"attention_head_size": D}, D**-0.5, False),
        ({"attention_head_size": D, "scale_attn_by_layer_idx": True, "layer_idx": 2},
         D**-0.5 / 3, False),
        ({"scale_attention_scores": False}, 1.0, False),
        ({"scale": 0.3}, 0.3, False),
        ({"attention_head_size": D, "use_alibi": True}, D**-0.5, True),
    ],
)  # fmt: skip
def test_attention_is_that_of_the_formula(
    arguments: dict[str, object], scale: float, alibi: bool, masked: bool, causal: bool
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(B, S, 3, HEADS, D, dtype=torch.float64)
    mask = torch.randn(B, 1, 1, S, dtype=torch.float64) if masked else None
    layer = FlashAttentionLayer(attention_dropout_prob=0.5, **arguments).eval()
    result = layer(qkv, mask, causal)
    assert result.shape == (B, HEADS, S, D)
    reference = expected(qkv, mask, causal, scale, alibi)
    torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-12)


def test_dropout_acts_in_training_only() -> None:
    layer = FlashAttentionLayer(0.5, D)
    qkv = torch.randn(B, S, 3, HEADS, D)
    torch.manual_seed(1)
    assert not torch.equal(layer(qkv), layer(qkv))
    layer.eval()
    assert torch.equal(layer(qkv), layer(qkv))


def test_a_scale_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_head_size"):
        FlashAttentionLayer()
    with pytest.raises(ConfigError, match="layer_idx"):
        FlashAttentionLayer(attention_head_size=D, scale_attn_by_layer_idx=True)
