from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.errors import CheckpointError, CommunicationError
from lightning_smp.weights.checkpoint import (
    gather_optimizer_state,
    gather_state_dict,
    load_full_state_dict,
    load_optimizer_state,
)
from lightning_smp.weights.collect import PipelineLinks
from lightning_smp.weights.ownership import Ownership, forget_foreign_state, release
from tests.support.launch import gloo_group, run_ranks

_CPU = torch.device("cpu")


class Counter(nn.Module):
    """Has extra state that only its owner advances, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "sizes": [1, 2], "last": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Model(nn.Module):
    """Tied weights, a batch norm, a frozen layer, many dtypes, extra state, an outer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.counter = Counter()
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.tail = nn.Linear(3, 3).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))


# The third of three stages stays empty.
_UNITS = {"embedding": 0, "norm": 1, "counter": 1, "frozen": 1, "head": 1, "tail": 0}


def _own(module: nn.Module, pp_rank: int, pp_size: int) -> Ownership:
    def stages(names: list[str]) -> dict[str, tuple[int, ...]]:
        placed = {name: _UNITS.get(name.partition(".")[0]) for name in names}
        return {name: (stage,) for name, stage in placed.items() if stage is not None}

    return Ownership(
        module,
        stages([name for name, _ in module.named_parameters(remove_duplicate=False)]),
        buffers=stages([name for name, _ in module.named_buffers(remove_duplicate=False)]),
        units={name: stage for name, stage in _UNITS.items() if hasattr(module, name)},
        pp_rank=pp_rank,
        pp_size=pp_size,
    )


def _model() -> Model:
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.randn(tensor.shape))
    model.norm.num_batches_tracked.fill_(7)
    model.counter.calls = 3
    return model


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.scale, *model.norm.parameters()], "lr": 0.5},
        {"params": [p for n, p in model.named_parameters() if n[:4] not in ("scal", "norm")]},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step; norm.bias never has a gradient, nor has anything foreign or frozen."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        is_real = parameter.untyped_storage().nbytes() >= parameter.nbytes
        if parameter.requires_grad and is_real and name != "norm.bias":
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()


def _links(ranks: tuple[int, ...], rank: int, pp_rank: int) -> PipelineLinks:
    group = dist.group.WORLD if len(ranks) > 1 else None
    return PipelineLinks(group=group, ranks=ranks, pp_rank=pp_rank, device=_CPU)


def _partitioned(pp_rank: int, pp_size: int) -> tuple[Model, Ownership]:
    model = _model()
    ownership = _own(model, pp_rank, pp_size)
    release(model, ownership)
    # What only the owner knows.
    model.counter.calls = 3 if ownership.pp_rank == 1 else 99
    return model, ownership


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        same = found.dtype is expected.dtype and found.shape == expected.shape
        return same and found.device.type == "cpu" and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            _equal(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return type(found) is type(expected) and found == expected


def _layout(rank: int, world_size: int) -> tuple[tuple[int, ...], int]:
    """Four ranks are two pipelines of two stages, fewer are one pipeline."""
    if world_size == 4:
        return ((0, 1), rank) if rank < 2 else ((2, 3), rank - 2)
    return tuple(range(world_size)), rank


def _gather(rank: int, world_size: int) -> tuple[dict[str, Any], bool]:
    ranks, pp_rank = _layout(rank, world_size)
    model, ownership = _partitioned(pp_rank, len(ranks))
    with gloo_group():
        full = gather_state_dict(model, ownership, _links(ranks, rank, pp_rank))
        if rank:
            return full, False
        tied = full["head.weight"].data_ptr() == full["embedding.weight"].data_ptr()
        return full, tied and hasattr(full, "_metadata")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gathered_state_is_that_of_one_device(world_size: int) -> None:
    (full, is_same), *others = run_ranks(_gather, world_size, timeout=60)
    assert type(full) is OrderedDict
    assert _equal(full, _model().state_dict())
    assert is_same
    assert all(not state for state, _ in others)


def test_whole_module_needs_no_communication() -> None:
    model = _model()
    links = PipelineLinks(group=None, ranks=(0,), pp_rank=0, device=_CPU)
    ownership = Ownership.whole(model)
    assert _equal(gather_state_dict(model, ownership, links), model.state_dict())
    optimizer = _optimizer(model, "adamw")
    _step(model, optimizer)
    expected = optimizer.state_dict()
    assert _equal(gather_optimizer_state(optimizer, ownership, links), expected)


def _train(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Two steps partitioned, gather, load into a fresh partition, one more step, gather."""
    ranks, pp_rank = _layout(rank, world_size)
    with gloo_group():
        links = _links(ranks, rank, pp_rank)
        model = _model()
        optimizer = _optimizer(model, kind)
        _step(model, optimizer)  # whole: leaves state of what becomes foreign
        ownership = _own(model, pp_rank, len(ranks))
        release(model, ownership)
        model.counter.calls = 3 if pp_rank == 1 else 99
        forget_foreign_state(optimizer, ownership)
        _step(model, optimizer)
        saved = {
            "model": gather_state_dict(model, ownership, links),
            "optimizer": gather_optimizer_state(optimizer, ownership, links),
        }
        box = [saved]
        dist.broadcast_object_list(box)  # the file that all ranks would read

        fresh, ownership = _partitioned(pp_rank, len(ranks))
        with torch.no_grad():
            for parameter in fresh.parameters():
                if ownership.is_local(parameter):
                    parameter.zero_()
        new = _optimizer(fresh, kind)
        result = load_full_state_dict(fresh, box[0]["model"], ownership)
        assert result.missing_keys == result.unexpected_keys == []
        load_optimizer_state(new, box[0]["optimizer"], ownership)
        assert all(ownership.is_local(parameter) for parameter in new.state)
        for parameter in fresh.parameters():
            assert type(parameter) is nn.Parameter
            assert ownership.is_local(parameter) or parameter.isnan().all()
        _step(fresh, new)
        return {
            "model": gather_state_dict(fresh, ownership, links),
            "optimizer": gather_optimizer_state(new, ownership, links),
        }


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_round_trip_equals_one_device(world_size: int, kind: str) -> None:
    model = _model()
    optimizer = _optimizer(model, kind)
    for _ in range(3):
        _step(model, optimizer)
    found, *others = run_ranks(_train, world_size, kind, timeout=60)
    assert _equal(found["model"], model.state_dict())
    assert _equal(found["optimizer"], optimizer.state_dict())
    assert all(other == {"model": {}, "optimizer": {}} for other in others)
    _optimizer(_model(), kind).load_state_dict(found["optimizer"])


def _errors_of(load: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        load()
    return str(caught.value)


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_strict_loading_says_what_torch_says(pp_rank: int) -> None:
    state = _model().state_dict()
    del state["norm.weight"], state["tail.bias"]
    state["extra"] = torch.zeros(1)
    state["frozen.weight"] = torch.zeros(3, 3)
    state["tail.weight"] = torch.zeros(1)
    model, ownership = _partitioned(pp_rank, 2)
    found = _errors_of(lambda: load_full_state_dict(model, state, ownership))
    assert found == _errors_of(lambda: _model().load_state_dict(state))
    assert found.count("size mismatch") == 2
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(b) is Tensor for b in model.buffers())


def test_loading_not_strictly_reports_all_keys() -> None:
    state = _model().state_dict()
    del state["norm.weight"], state["tail.bias"]
    state["extra"] = torch.zeros(1)
    model, ownership = _partitioned(0, 2)
    result = load_full_state_dict(model, state, ownership, strict=False)
    assert result == _model().load_state_dict(state, strict=False)


class Renaming(Model):
    """Saves the head under another name and loads it back; computes an entry on the way."""

    def __init__(self, fused: tuple[str, str]) -> None:
        super().__init__()
        self.fused = fused
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["old.frozen"] = state.pop("frozen.bias")
        state["fused"] = torch.cat([state[name].flatten() for name in module.fused])

    @staticmethod
    def _load(module: Any, state: dict[str, Any], *args: Any) -> None:
        state["frozen.bias"] = state.pop("old.frozen")
        state.pop("fused")


def _renaming(rank: int, world_size: int, fused: tuple[str, str]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Renaming(fused)
    ownership = _own(model, rank, 2)
    before = copy.deepcopy(model.frozen.bias)
    release(model, ownership)
    with gloo_group():
        full = gather_state_dict(model, ownership, _links((0, 1), rank, rank))
        box = [full]
        dist.broadcast_object_list(box)
        load_full_state_dict(model, box[0], ownership)
        assert torch.equal(model.frozen.bias, before) == (rank == 1)
        return full


def test_hooks_on_the_state_dict_work() -> None:
    fused = ("embedding.weight", "tail.bias")  # both real on the writer
    torch.manual_seed(1)
    expected = Renaming(fused).state_dict()
    full, _ = run_ranks(_renaming, 2, fused, timeout=60)
    assert _equal(full, expected)


def _fused_across(rank: int, world_size: int) -> None:
    model = Renaming(("embedding.weight", "frozen.weight"))
    ownership = _own(model, rank, 2)
    release(model, ownership)
    with gloo_group():
        links = _links((0, 1), rank, rank)
        if rank == 0:
            with pytest.raises(CheckpointError, match=r"'fused'.*another stage"):
                gather_state_dict(model, ownership, links)
        else:
            gather_state_dict(model, ownership, links)


def test_entries_computed_from_foreign_values_are_refused() -> None:
    run_ranks(_fused_across, 2, timeout=60)


class Odd(nn.Module):
    """A unit whose extra state cannot travel, or is known to its owner only."""

    def __init__(self, state: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 1)
        self.counter = Counter()
        self.state = state

    def part(self, pp_rank: int) -> None:
        if self.state == "object":
            self.counter.get_extra_state = object  # type: ignore[method-assign]
        elif self.state == "absent" and pp_rank == 1:
            self.counter.weight = None
        elif self.state == "late" and pp_rank == 1:
            self.counter.register_buffer("late", torch.ones(2))


def _odd(rank: int, world_size: int, state: str) -> None:
    model = Odd(state)
    ownership = _own(model, rank, 2)
    release(model, ownership)
    model.part(rank)
    errors: tuple[type[Exception], ...] = (CheckpointError, CommunicationError, TypeError)
    with gloo_group():
        try:
            full = gather_state_dict(model, ownership, _links((0, 1), rank, rank))
        except errors as error:
            raised = type(error)
        else:
            raised = type(None)
            assert rank or "late" not in state or torch.equal(full["counter.late"], torch.ones(2))
    by_rank = {
        "object": (CommunicationError, TypeError),
        "absent": (CheckpointError, type(None)),
        "late": (type(None), type(None)),
    }
    assert raised is by_rank[state][rank]


@pytest.mark.parametrize("state", ["object", "absent", "late"])
def test_what_cannot_travel_is_refused(state: str) -> None:
    run_ranks(_odd, 2, state, timeout=60)


def test_optimizer_groups_that_differ_are_refused_as_in_torch() -> None:
    model, ownership = _partitioned(0, 2)
    optimizer = _optimizer(model, "sgd")
    saved = torch.optim.SGD(_model().parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_optimizer_state(optimizer, saved, ownership)
