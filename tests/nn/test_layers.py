"""Distributed modules against what the same modules compute whole, and against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_smp.nn as snn
from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.nn.functional import alibi_slopes, dropout
from lightning_smp.tensor_parallel.context import TensorParallel
from tests.support.launch import gloo_group, run_ranks
from tests.tensor_parallel.reduce import compare

_B, _S, _H = 12, 5, 18  # H is not divided by 4
_LAYER = {
    "num_attention_heads": 5,
    "attention_head_size": 4,
    "hidden_size": _H,
    "intermediate_size": 22,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def _places() -> Iterator[TensorParallel]:
    group = dist.group.WORLD
    assert group is not None
    for prescaled, optimize in product((False, True), ("speed", "memory")):
        yield TensorParallel.over(group, prescaled=prescaled, optimize=optimize)  # type: ignore[arg-type]


def _pair(make: Callable[..., nn.Module], tp: TensorParallel, **kwargs: Any) -> Any:
    """A whole module, and its split twin with the same weights."""
    torch.manual_seed(3)
    whole = make(**kwargs, tp=TensorParallel())
    split = make(**kwargs, tp=tp)
    torch.manual_seed(5)  # constructing uneven parts has drawn other numbers on each rank
    for (_, old), (name, new) in zip(whole.named_modules(), split.named_modules(), strict=True):
        shardings = getattr(new, "shardings", {})
        for key, parameter in new.named_parameters(recurse=False):
            full = getattr(old, key)
            with torch.no_grad():
                full.add_(torch.randn_like(full) * 0.1)  # biases and norms are not constants
                given = shardings[key].shard(full, tp.rank) if key in shardings else full
                assert parameter.shape == given.shape, name
                parameter.copy_(given)
    return whole, split


def _loss(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 2, output.shape[-1])).tanh().mean()


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_B, _S, _H, generator=generator)
    memory = torch.randn(_B, 7, _H, generator=generator)
    mask = torch.where(torch.rand(_B, 1, 1, _S, generator=generator) < 0.3, -1e4, 0.0)
    return x, memory, mask


def _check_linear_and_embedding(tp: TensorParallel) -> None:
    x, _, _ = _batch()
    whole, split = _pair(snn.DistributedLinear, tp, in_features=_H, out_features=7)
    assert split.weight.shape == (7, split.shardings["weight"].sizes[tp.rank])
    compare(whole, split, tp, lambda m, cut: _loss(m(cut(x))))
    ids = torch.randint(9, (_B, _S), generator=torch.Generator().manual_seed(2))
    for options in ({"padding_idx": 4}, {"max_norm": 0.3}):
        whole, split = _pair(
            snn.DistributedEmbedding, tp, num_embeddings=9, embedding_dim=_H, **options
        )
        compare(whole, split, tp, lambda m, cut: _loss(m(cut(ids))))


def _check_halves(tp: TensorParallel) -> None:
    x, memory, mask = _batch()
    for pre, post in ((True, False), (False, True), (True, True)):
        norms = {"pre_layernorm": pre, "post_layernorm": post}
        sizes = {k: v for k, v in _LAYER.items() if k != "intermediate_size"}
        whole, split = _pair(
            snn.DistributedAttentionLayer, tp, **sizes, **norms, causal_mask_size=8, use_alibi=pre
        )
        compare(whole, split, tp, lambda m, cut: _loss(m((cut(x), cut(mask)))))
        compare(whole, split, tp, lambda m, cut: _loss(m((cut(x), None))))
        whole, split = _pair(
            snn.DistributedTransformerOutputLayer, tp, hidden_size=_H, intermediate_size=22,
            hidden_dropout_prob=0.0, **norms, activation="gelu" if pre else "relu",
        )  # fmt: skip
        compare(whole, split, tp, lambda m, cut: _loss(m(cut(x))))
    whole, split = _pair(
        snn.DistributedTransformerLayer, tp, **_LAYER, add_cross_attention=True,
        pre_layernorm=True, post_layernorm=False,
    )  # fmt: skip
    compare(whole, split, tp, lambda m, cut: _loss(m((cut(x), cut(memory), cut(mask), None))[0]))


def _check_stacks(tp: TensorParallel) -> None:
    x, _, mask = _batch()
    whole, split = _pair(
        snn.DistributedTransformer, tp, num_layers=2, **_LAYER, pre_layernorm=True,
        post_layernorm=True, fp32_residual_addition=True,
    )  # fmt: skip
    compare(whole, split, tp, lambda m, cut: _loss(m((cut(x), cut(mask)))[0]))
    ids = torch.randint(29, (_B, _S), generator=torch.Generator().manual_seed(4))
    padded = (mask[:, 0, 0] != 0).long()
    padded[:, 0] = 0
    for pre in (True, False):
        whole, split = _pair(
            snn.DistributedTransformerLMHead, tp, num_layers=2, **_LAYER, vocab_size=29,
            num_positions=8, num_token_types=2, pre_layernorm=pre, post_layernorm=not pre,
            causal_mask_size=8 if pre else None,
        )  # fmt: skip
        compare(
            whole, split, tp,
            lambda m, cut: m((cut(ids), cut(padded), cut(ids % 2), None, cut(ids)))[0],
        )  # fmt: skip
        compare(
            whole, split, tp,
            lambda m, cut: F.mse_loss(m((cut(ids), None, None, None, None)) * 1.0, _zeros(cut)),
        )  # fmt: skip


def _zeros(cut: Callable[[Tensor], Tensor]) -> Tensor:
    return cut(torch.zeros(_B, _S, 29))


def _check_dropout(tp: TensorParallel) -> None:
    """Slices are dropped by streams of their own, whole values alike, again on recomputation."""
    module = snn.DistributedLinear(8, 8, tp=tp)
    torch.manual_seed(100 + tp.rank)  # as ranks with different samples have it
    found = {}
    for sliced in (True, False):
        state = torch.get_rng_state()
        mask = dropout(module, torch.ones(64), 0.5, sliced=sliced)
        torch.set_rng_state(state)
        assert torch.equal(dropout(module, torch.ones(64), 0.5, sliced=sliced), mask)
        masks = [torch.empty_like(mask) for _ in range(tp.size)]
        dist.all_gather(masks, mask)
        found[sliced] = all(torch.equal(other, mask) for other in masks)
        assert not torch.equal(dropout(module, torch.ones(64), 0.5, sliced=sliced), mask)
    assert found == {True: False, False: True}


def _rank(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    with gloo_group():
        for tp in _places():
            _check_dropout(tp)
            _check_linear_and_embedding(tp)
            _check_halves(tp)
            _check_stacks(tp)


@pytest.mark.parametrize("world_size", [2, 4])
def test_split_modules_compute_what_whole_ones_do(world_size: int) -> None:
    run_ranks(_rank, world_size, timeout=120)


class _PlainLayer(nn.Module):
    """A pre-norm transformer layer as anybody would write it."""

    def __init__(self, layer: snn.DistributedTransformerLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attention, output = self.layer.attention, self.layer.output
        norm = attention.pre_layernorm
        normed = F.layer_norm(x, (_H,), norm.weight, norm.bias)

        def heads(linear: Any) -> Tensor:
            y = F.linear(normed, linear.weight, linear.bias)
            return y.view(_B, _S, 5, 4).transpose(1, 2)

        scores = heads(attention.query) @ heads(attention.key).transpose(-1, -2) / 2.0 + mask
        scores = scores.masked_fill(torch.ones(_S, _S).triu(1).bool(), -torch.inf)
        context = (scores.softmax(-1) @ heads(attention.value)).transpose(1, 2).flatten(2)
        x = x + F.linear(context, attention.dense.weight, attention.dense.bias)
        norm = output.pre_layernorm
        inner = F.linear(
            F.layer_norm(x, (_H,), norm.weight, norm.bias), output.dense1.weight, output.dense1.bias
        )
        return x + F.linear(F.gelu(inner), output.dense2.weight, output.dense2.bias)


def test_a_layer_is_a_plain_transformer_layer() -> None:
    x, _, mask = (t.double() for t in _batch())
    layer = snn.DistributedTransformerLayer(
        **_LAYER, causal_mask_size=_S, pre_layernorm=True, post_layernorm=False
    ).double()
    hidden, same_mask = layer((x, mask))
    assert same_mask is mask
    torch.testing.assert_close(hidden, _PlainLayer(layer)(x, mask), rtol=1e-12, atol=1e-12)
    assert all(
        isinstance(m, snn.FusedLayerNorm) for m in layer.modules() if isinstance(m, nn.LayerNorm)
    )


def test_layers_follow_each_other_in_a_sequential() -> None:
    x, _, mask = _batch()
    stack = nn.Sequential(*(snn.DistributedTransformerLayer(**_LAYER) for _ in range(2)))
    assert stack((x, mask))[0].shape == x.shape


def test_the_whole_model_without_a_head_gives_hidden_states() -> None:
    model = snn.DistributedTransformerLMHead(
        1, **_LAYER, vocab_size=11, num_positions=8, add_lm_head=False
    )
    assert model((torch.zeros(2, 3, dtype=torch.long), None, None, None, None)).shape == (2, 3, _H)


def test_slopes_are_those_of_the_paper() -> None:
    torch.testing.assert_close(alibi_slopes(8, 8), 2.0 ** -torch.arange(1, 9.0))
    assert alibi_slopes(6, 8).tolist() == [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0]


def test_what_cannot_be_is_refused_by_name() -> None:
    tp = TensorParallel("absent", 0, 4)
    with pytest.raises(ConfigError, match="num_attention_heads=2"):
        snn.DistributedAttentionLayer(2, 4, 8, tp=tp)
    with pytest.raises(ConfigError, match="one of them must be True"):
        snn.DistributedAttentionLayer(2, 4, 8, pre_layernorm=False, post_layernorm=False)
    with pytest.raises(ConfigError, match="in_features=3"):
        snn.DistributedLinear(3, 8, tp=tp)
    with pytest.raises(ConfigError, match="activation='swish'"):
        snn.DistributedTransformerOutputLayer(8, 8, activation="swish")
    layer = snn.DistributedAttentionLayer(2, 4, 8, causal_mask_size=4)
    with pytest.raises(UnsupportedError, match="causal_mask_size=4"):
        layer((torch.randn(1, 5, 8), None))
    with pytest.raises(UnsupportedError, match="takes one tuple"):
        snn.DistributedTransformerLayer(**_LAYER)(torch.randn(1, 5, _H))
