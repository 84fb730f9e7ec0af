"""Stages given in code: what is marked, and the partition that it amounts to."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import lightning_smp as smp
from lightning_smp.errors import PartitionError
from lightning_smp.partitioning import Partition, analyze, find_atoms, plan_partition
from lightning_smp.partitioning.marks import marked_stages
from tests.partitioning.zoo import Block


class Net(nn.Module):
    """Four blocks, a norm and a head; `stages` says who is made where."""

    def __init__(self, stages: Mapping[str, int | None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._made(stages, f"blocks.{i}", _block) for i in range(4))
        self.norm = self._made(stages, "norm", lambda: nn.LayerNorm(16))
        self.head = self._made(stages, "head", lambda: nn.Linear(16, 2))

    def _made(self, stages: Mapping[str, Any], name: str, make: Callable[[], Any]) -> nn.Module:
        if stages.get(name) is None:
            return make()
        with smp.partition(stages[name]):
            return make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _block() -> Block:
    return Block(16)


def plan(model: nn.Module, stages: int, default: int | None = 0, **options: Any) -> Partition:
    atoms = find_atoms(model)
    analysis = analyze(model, lambda copied: copied(torch.ones(2, 3, 16)), atoms)
    return plan_partition(
        model, analysis, atoms, stages, memory_weight=0.5, default_partition=default,
        manual=marked_stages(model, atoms, default), **options,
    )  # fmt: skip


def test_modules_created_inside_are_assigned_and_the_others_go_to_the_default() -> None:
    model = Net({"blocks.1": 1, "blocks.2": 2, "head": 2})
    assert dict(plan(model, 3).stage_of) == {
        "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 0, "norm": 0, "head": 2,
    }  # fmt: skip
    assert plan(model, 3, default=1).stage_of["norm"] == 1


def test_the_innermost_context_wins() -> None:
    with smp.partition(1):
        outer = Net({"blocks.3": 0, "head": 2})
    stage_of = plan(outer, 3).stage_of
    assert (stage_of["blocks.0"], stage_of["blocks.3"], stage_of["head"]) == (1, 0, 2)
    assert stage_of["norm"] == 1


def test_creation_counts_not_registration() -> None:
    with smp.partition(1):
        blocks = [_block() for _ in range(2)]
    model = Net({})
    model.blocks = nn.ModuleList([*blocks, _block()])
    stage_of = plan(model, 2).stage_of
    assert [stage_of[f"blocks.{i}"] for i in range(3)] == [1, 1, 0]


def test_an_unmarked_child_does_not_inherit() -> None:
    outside = _block()
    with smp.partition(1):
        model = Net({})
        model.blocks[2] = outside
    assert plan(model, 2).stage_of["blocks.2"] == 0
    assert plan(model, 2).stage_of["blocks.1"] == 1


def test_copies_made_inside_are_assigned_and_others_keep_their_stage() -> None:
    with smp.partition(1):
        made = _block()
        with smp.partition(0):
            copied = copy.deepcopy(made)
    model = Net({})
    model.blocks = nn.ModuleList([made, copied, copy.deepcopy(made)])
    stage_of = plan(model, 2).stage_of
    assert [stage_of[f"blocks.{i}"] for i in range(3)] == [1, 0, 1]


def test_set_partition_covers_what_is_below() -> None:
    model = Net({"blocks.0": 1, "head": 1})
    smp.set_partition(model.blocks, 2)
    smp.set_partition(model.blocks[3], 1)
    stage_of = plan(model, 3).stage_of
    assert [stage_of[f"blocks.{i}"] for i in range(4)] == [2, 2, 2, 1]
    assert stage_of["head"] == 1


def test_a_part_of_what_is_never_divided_is_refused_or_counts_for_the_whole() -> None:
    model = Net({})
    smp.set_partition(model.blocks[1].qkv, 1)
    with pytest.raises(PartitionError, match=r"'blocks.1.qkv'.*stage 1.*inside 'blocks.1'"):
        plan(model, 2)
    for child in model.blocks[1].children():
        smp.set_partition(child, 1)
    assert plan(model, 2).stage_of["blocks.1"] == 1


@pytest.mark.parametrize("index", [-1, "1", 1.0, True])
def test_an_index_that_is_no_stage(index: Any) -> None:
    with pytest.raises(PartitionError, match=r"smp\.partition is"):
        smp.partition(index)
    with pytest.raises(PartitionError, match=r"given to Linear by smp\.set_partition"):
        smp.set_partition(nn.Linear(2, 2), index)


def test_an_index_out_of_range_is_named_at_the_plan() -> None:
    model = Net({"head": 2})
    with pytest.raises(PartitionError, match=r"'head' is 2. With 2 stages"):
        plan(model, 2)


def test_shared_parameters_placed_apart_are_mirrored_or_refused_by_name() -> None:
    model = Net({"head": 1})
    model.head = nn.Linear(16, 16)
    smp.set_partition(model.head, 1)
    model.norm = nn.Linear(16, 16)
    model.head.weight = model.norm.weight
    partition = plan(model, 2)
    assert partition.mode == "mirrored"
    assert [(s.names, s.stages) for s in partition.sharing] == [
        (("norm.weight", "head.weight"), (0, 1))
    ]
    with pytest.raises(PartitionError, match=r"norm.weight, head.weight are on stages 0, 1"):
        plan(model, 2, tied_parameters="together")


def test_other_threads_and_later_modules_are_not_marked() -> None:
    made: list[nn.Module] = []
    with smp.partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    made.append(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="stop"), smp.partition(1):
        raise RuntimeError("stop")
    made.append(nn.Linear(2, 2))
    assert not any("_smp_stage" in vars(module) for module in made)


def test_marks_change_neither_state_nor_atoms() -> None:
    plain, marked = Net({}), Net({"head": 1, "blocks.2": 0})
    assert list(plain.state_dict()) == list(marked.state_dict())
    assert [a.name for a in find_atoms(plain)] == [a.name for a in find_atoms(marked)]
