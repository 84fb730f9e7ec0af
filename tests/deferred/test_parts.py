"""A part of a deferred tensor is made alone, and is what eager construction gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_smp.deferred import (
    Part,
    deferring,
    fingerprint,
    is_deferred,
    parts,
    realize_module,
    value_of,
)
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.marks import tensor_parallelism
from lightning_smp.tensor_parallel.module import shardings_of
from lightning_smp.tensor_parallel.pretrained import pretrained_rule
from lightning_smp.tensor_parallel.replace import distribute, marked_rule
from tests.deferred.models import HUGGING_FACE, MODELS, built_twice

_ROWS, _COLUMNS = 3001, 130


def _table(fill: Callable[[Tensor], object], dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Module()
    module.register_parameter("table", nn.Parameter(torch.empty(_ROWS, _COLUMNS, dtype=dtype)))
    with torch.no_grad():
        fill(module.table)
    return module


def _padded(weight: Tensor) -> None:
    nn.init.normal_(weight, 0.0, 0.02)
    weight[5].zero_()


def _scaled(weight: Tensor) -> None:
    weight.uniform_(-1, 1).mul_(weight).add_(torch.tensor(2.0), alpha=2).clamp_(max=4.5)


def _made_of_others() -> nn.Module:
    module = nn.Module()
    module.table = nn.Parameter((torch.randn(_ROWS, _COLUMNS) * 0.02).to(torch.bfloat16))
    return module


_TABLES: dict[str, Callable[[], nn.Module]] = {
    "normal": lambda: _table(nn.init.normal_),
    "uniform": lambda: _table(lambda w: nn.init.kaiming_uniform_(w, a=5**0.5)),
    "double": lambda: _table(nn.init.normal_, torch.float64),
    "half": lambda: _table(nn.init.uniform_, torch.float16),
    "truncated": lambda: _table(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "padded": lambda: _table(_padded),
    "scaled": lambda: _table(_scaled),
    "ones": lambda: _table(nn.init.ones_),
    "made_of_others": _made_of_others,
}
_PARTS = [
    Part(0, ((0, 1000),)),
    Part(0, ((2900, _ROWS),)),
    Part(0, ((10, 20), (1000, 1500))),
    Part(1, ((0, 65),)),
    Part(1, ((3, 10), (60, 61), (100, 130))),
]


def _largest(action: Callable[[], object]) -> int:
    """Bytes of the largest memory that an action asks for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = profiler.events() or ()
    return max(event.self_cpu_memory_usage for event in events)


@pytest.mark.parametrize("name", _TABLES)
def test_parts_of_large_tensors_without_the_whole(name: str) -> None:
    eager, model = built_twice(_TABLES[name], deferring())
    table, piece = model.table, parts.PIECE * 8 + 2**10
    whole = table.numel() * table.element_size()
    for part in _PARTS:
        found: list[Tensor] = []
        largest = _largest(lambda part=part, found=found: found.append(value_of(table, part=part)))  # type: ignore[misc]
        assert torch.equal(found[0], part.of(eager.table))
        assert found[0].untyped_storage().nbytes() == found[0].numel() * table.element_size()
        assert largest <= max(found[0].untyped_storage().nbytes(), piece) < whole
    assert is_deferred(table)


def test_the_measure_sees_a_whole_tensor() -> None:
    _, model = built_twice(lambda: _table(nn.init.orthogonal_), deferring())
    largest = _largest(lambda: value_of(model.table, part=_PARTS[0]))
    assert largest >= _ROWS * _COLUMNS * 4


@pytest.mark.parametrize("name", [*MODELS, *HUGGING_FACE])
def test_parts_of_every_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE", 48)
    make = (MODELS | HUGGING_FACE)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, model = built_twice(make, deferring())
    expected = dict(eager.named_parameters())
    for key, parameter in model.named_parameters():
        for dim, length in enumerate(parameter.shape):
            for ranges in (((0, (length + 1) // 2),), ((length // 3, length),)):
                part = Part(dim, ranges)
                found = value_of(parameter, part=part)
                assert torch.equal(found, part.of(expected[key].detach())), (key, part)


class _Head(nn.Module):
    """A marked embedding and head of 1000 x 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        with tensor_parallelism():
            self.embedding = nn.Embedding(1000, 256)
            self.head = nn.Linear(256, 1000)


def _gpt2() -> nn.Module:
    import transformers as t

    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=1000, n_embd=256, n_layer=1, n_head=4, n_positions=16)
    )


@pytest.mark.parametrize("make", [_Head, _gpt2])
def test_a_rank_makes_its_part_only(make: Callable[[], nn.Module]) -> None:
    """Splitting a model that was built without memory makes nothing; then its parts are made."""
    eager, model = built_twice(make, deferring())
    weights = dict(eager.named_parameters())
    tp = TensorParallel(rank=1, size=4)
    result: list[nn.Module] = []

    def split() -> None:
        result.append(distribute(model, tp, [pretrained_rule(), marked_rule])[0])

    assert _largest(split) < 2**17
    assert all(map(is_deferred, result[0].parameters()))
    largest = _largest(lambda: realize_module(result[0]))
    shardings = shardings_of(result[0])
    assert len(shardings) >= 2
    for name, parameter in result[0].named_parameters():
        if name in shardings:
            assert torch.equal(parameter, shardings[name].shard(weights[name].detach(), tp.rank))
    assert largest <= max(1000 * 256 // 4 * 4, parts.PIECE * 8 + 2**10)


def test_fingerprints_are_those_of_one_way_to_be_made() -> None:
    def made(seed: int, std: float) -> Tensor:
        torch.manual_seed(seed)
        with deferring():
            return _table(lambda w: nn.init.normal_(w, 0.0, std)).table  # type: ignore[return-value]

    assert fingerprint(made(1, 0.5)) == fingerprint(made(1, 0.5))
    assert len({fingerprint(made(*how)) for how in ((1, 0.5), (2, 0.5), (1, 0.25))}) == 3
