"""Marks, registration and replacement, without processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp import nn as snn
from lightning_smp.errors import ConfigError
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.marks import mark_of
from lightning_smp.tensor_parallel.replace import distribute, marked_rule, registered_rule

_TP = TensorParallel("absent", rank=1, size=2)


@pytest.fixture(autouse=True)
def _registrations() -> Iterator[None]:
    before = dict(state.registrations)
    yield
    state.registrations.clear()
    state.registrations.update(before)


def test_the_innermost_context_counts_and_nothing_stays_patched() -> None:
    before = nn.Module.__init__
    with smp.tensor_parallelism(fused=1):
        outer = nn.Linear(2, 2)
        with smp.tensor_parallelism(False):
            inner = nn.Linear(2, 2)
        again = nn.Linear(2, 2)
    assert nn.Module.__init__ is before
    assert mark_of(outer) == mark_of(again)
    assert mark_of(outer).arguments == {"fused": 1}  # type: ignore[union-attr]
    assert not mark_of(inner).enabled  # type: ignore[union-attr]
    assert mark_of(nn.Linear(2, 2)) is None
    assert mark_of(copy.deepcopy(outer)) == mark_of(outer)


def test_model_creation_marks() -> None:
    with smp.model_creation(tensor_parallelism=True, attention_in_fp32=True):
        linear = nn.Linear(2, 2)
    assert mark_of(linear).arguments == {"attention_in_fp32": True}  # type: ignore[union-attr]


def _marked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4)))
    smp.set_tensor_parallelism(model)
    return model


def test_marked_modules_take_their_part_of_the_weights_in_place() -> None:
    model = _marked()
    smp.set_tensor_parallelism(model[1][0], False)
    model[0].weight.requires_grad_(False)
    model.eval()
    old = model[0]
    model.also = old  # type: ignore[assignment]
    result, report = distribute(model, _TP)
    assert result is model
    assert isinstance(model[0], snn.DistributedLinear)
    assert model[0] is model.also
    assert torch.equal(model[0].weight, old.weight[:, 3:])
    assert torch.equal(model[0].bias, old.bias)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert not model[0].training
    assert type(model[1][0]) is nn.Linear
    assert isinstance(model[1][1], snn.DistributedEmbedding)
    assert [name for name, _, _ in report.distributed] == ["0", "1.1"]
    assert "1.1: Embedding -> DistributedEmbedding" in str(report)


def test_a_model_that_is_replaced_itself_is_returned() -> None:
    linear = nn.Linear(4, 3)
    smp.set_tensor_parallelism(linear)
    result, _ = distribute(linear, _TP)
    assert isinstance(result, snn.DistributedLinear)


def test_one_rank_replaces_nothing() -> None:
    model = _marked()
    _, report = distribute(model, TensorParallel())
    assert report.distributed == ()
    assert type(model[0]) is nn.Linear


def test_shared_weights_and_sizes_keep_modules_whole_and_the_report_says_so() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["words"].weight
    model["tiny"] = nn.Linear(1, 3)
    smp.set_tensor_parallelism(model)
    _, report = distribute(model, _TP)
    assert report.distributed == ()
    assert ("words", "Embedding", "it shares weights with 'head'") in report.kept
    assert "tiny: Linear stays whole: in_features=1" in str(report)


def test_fresh_weights_differ_by_rank_and_leave_the_generator_alone() -> None:
    made = []
    for rank in range(2):
        torch.manual_seed(4)
        model = _marked()
        before = torch.get_rng_state()
        distribute(model, TensorParallel("absent", rank, 2), weights="reinit")
        assert torch.equal(torch.get_rng_state(), before)
        made.append(model[0].weight.detach())
    assert made[0].shape == made[1].shape
    assert not torch.equal(*made)


def test_modules_made_with_equal_seeds_hold_parts_of_what_one_device_has() -> None:
    torch.manual_seed(1)
    whole = snn.DistributedLinear(6, 4, tp=TensorParallel())
    for rank in range(2):
        torch.manual_seed(1)
        part = snn.DistributedLinear(6, 4, tp=TensorParallel("absent", rank, 2))
        assert torch.equal(part.weight, whole.weight[:, 3 * rank : 3 * rank + 3])
        assert torch.equal(part.bias, whole.bias)


class Gate(nn.Module):
    """A module with arguments of its own."""

    def __init__(self, size: int, *, slope: float = 1.0) -> None:
        super().__init__()
        self.proj = nn.Linear(size, size)
        self.slope = slope

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": self.proj(x) * self.slope * scale}


class SplitGate(snn.DistributedModule):
    """What takes its place."""

    def __init__(self, width: int, slope: float, eps: float = 0.0) -> None:
        super().__init__(tp=_TP)
        self.proj = snn.DistributedLinear(width, width, tp=self.tp)
        self.slope, self.eps = slope, eps

    def forward(self, pair: tuple[Tensor, float]) -> Tensor:
        return pair[0] * self.slope * pair[1]


def _init(size: int, *, slope: float = 1.0) -> Any:
    return (size,), {"slope": slope}


def test_hooks_translate_construction_calls_and_results() -> None:
    early = Gate(4)
    smp.tp_register_with_module(
        Gate, SplitGate, _init, lambda x, scale=1.0: (((x, scale),), {}), lambda y: {"y": y}
    )
    with smp.tensor_parallelism(eps=0.5, unknown=3):
        gate = Gate(4, slope=2.0)
    model = nn.ModuleDict({"gate": gate, "early": early, "off": Gate(4)})
    smp.set_tensor_parallelism(model["off"], False)
    _, report = distribute(model, _TP, (registered_rule, marked_rule))
    split = model["gate"]
    assert isinstance(split, SplitGate)
    assert (split.slope, split.eps) == (2.0, 0.5)
    assert torch.equal(split.proj.weight, gate.proj.weight[:, 2:])
    assert torch.equal(split(torch.ones(1), scale=3.0)["y"], torch.full((1,), 6.0))
    assert torch.equal(copy.deepcopy(split)(torch.ones(1))["y"], torch.full((1,), 2.0))
    assert type(model["off"]) is Gate
    assert "early: Gate stays whole: it was constructed before" in str(report)


def test_a_class_is_registered_by_decorator_and_only_with_a_distributed_one() -> None:
    @smp.tp_register(SplitGate, init_hook=_init)
    class Registered(Gate):
        pass

    model = nn.Sequential(Registered(4))
    distribute(model, _TP, (registered_rule,))
    assert isinstance(model[0], SplitGate)
    with pytest.raises(ConfigError, match=r"subclass of smp.nn.DistributedModule"):
        smp.tp_register_with_module(Gate, nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"subclass of nn.Module"):
        smp.tp_register_with_module(int, SplitGate)  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_an_error_that_names_the_way_out() -> None:
    class Other(snn.DistributedModule):
        def __init__(self, size: int, slope: float = 1.0) -> None:
            super().__init__(tp=_TP)
            self.other = nn.Linear(size, size)

    smp.tp_register_with_module(Gate, Other)
    model = nn.Sequential(Gate(4))
    with pytest.raises(ConfigError, match='tensor_parallel_weights="reinit"'):
        distribute(model, _TP, (registered_rule,))


def test_distributed_modules_made_early_are_split_with_their_weights() -> None:
    model = nn.Sequential(snn.DistributedLinear(6, 4))
    whole = model[0]
    distribute(model, _TP)
    assert model[0].tp is _TP
    assert torch.equal(model[0].weight, whole.weight[:, 3:])
