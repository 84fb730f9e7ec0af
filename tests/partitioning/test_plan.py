"""The plan: every atom has a stage, ties are kept, manual wishes are checked."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.analysis import Analysis, analyze, count_parameters
from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.partitioning.plan import Partition, plan_partition
from tests.partitioning import zoo


def counted(root: nn.Module) -> Analysis:
    return count_parameters(root, find_atoms(root), reason="not run")


def plan(
    root: nn.Module, num_stages: int, analysis: Analysis | None = None, **kwargs: Any
) -> Partition:
    kwargs.setdefault("memory_weight", 0.2)
    partition = plan_partition(
        root, analysis or counted(root), find_atoms(root), num_stages, **kwargs
    )
    assert list(partition.stage_of) == [atom.name for atom in find_atoms(root)]
    assert sorted(partition.order) == sorted(partition.stage_of)
    assert all(0 <= stage < num_stages for stage in partition.stage_of.values())
    return partition


def test_thirty_layers_on_four_stages_stay_thirty() -> None:
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    partition = plan(root, 4)
    assert len(partition.stage_of) == 30
    stages = list(partition.stage_of.values())
    assert stages == sorted(stages)
    assert sorted(stages.count(stage) for stage in range(4)) == [7, 7, 8, 8]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7, 20])
def test_execution_order_rules(num_stages: int) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    root = Backwards()
    analysis = analyze(root, lambda net: net(torch.zeros(2, 4)), find_atoms(root))
    partition = plan(root, num_stages, analysis)
    stages = [partition.stage_of[f"layers.{i}"] for i in range(8)]
    assert stages == sorted(stages, reverse=True)
    assert partition.empty_stages == tuple(range(8, num_stages))


def test_tied_together_and_mirrored() -> None:
    root = zoo.GPT(6)
    names = ("wte.weight", "head.weight")
    together = plan(root, 3, tied_parameters="together")
    assert together.stage_of["wte"] == together.stage_of["head"]
    assert together.mode == "together"
    assert [s.names for s in together.sharing] == [names]
    mirrored = plan(root, 3, tied_parameters="mirrored")
    assert mirrored.mode == "mirrored"
    assert mirrored.sharing[0].stages == (0, 2)
    assert mirrored.sharing[0].is_mirrored
    auto = plan(root, 3)
    assert auto.slowest is not None
    assert auto.slowest <= min(together.slowest or 1, mirrored.slowest or 1) * (1 + 1e-9)
    assert plan(zoo.GPT(6, tied=False), 3).mode == "none"


def test_shared_batch_norm_is_never_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6)
            )
            self.layers[5][1] = self.layers[0][1]

    root = Net()
    partition = plan(root, 3, tied_parameters="mirrored")
    assert partition.stage_of["layers.0"] == partition.stage_of["layers.5"]
    with pytest.raises(PartitionError, match="drift apart"):
        plan(root, 3, manual={"layers.5": 2})


def test_stateless_atoms_float_with_their_layer() -> None:
    root = zoo.mlp(depth=4)
    analysis = analyze(root, lambda net: net(torch.zeros(2, 16)), find_atoms(root))
    partition = plan(root, 3, analysis)
    assert partition.floating == ("1", "3", "5", "7")
    assert all(
        partition.stage_of[name] == partition.stage_of[str(int(name) - 1)]
        for name in partition.floating
    )


def test_atoms_never_called_follow() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.teacher = nn.Linear(4, 4)
            self.alias = nn.Linear(4, 4)
            self.alias.weight = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    root = Net()
    analysis = analyze(root, lambda net: net(torch.zeros(2, 4)), find_atoms(root))
    for tied in ("together", "mirrored"):
        stage_of = plan(root, 2, analysis, tied_parameters=tied, memory_weight=0.0).stage_of
        assert stage_of["early"] == stage_of["layers.0"] == stage_of["alias"] == 0
        assert stage_of["teacher"] == stage_of["layers.3"] == 1


def test_model_without_atoms_or_calls() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    assert plan(Bare(), 2).empty_stages == (0, 1)
    root = zoo.mlp()
    idle = analyze(root, lambda net: None, find_atoms(root))  # the first batch was skipped, say
    assert idle.reason == "the step called no submodule"
    for virtual in (1, 2):
        assert set(plan(root, 2, idle, virtual_stages=virtual).stage_of.values()) == {0, 1}


@pytest.mark.parametrize("virtual", [1, 2])
def test_model_without_state(virtual: int) -> None:
    root = nn.Sequential(nn.ReLU(), nn.Tanh())
    idle = analyze(root, lambda net: None, find_atoms(root))
    assert set(plan(root, 2, idle, virtual_stages=virtual).stage_of.values()) <= {0, 1}
    assert plan(nn.Module(), 2, virtual_stages=virtual).empty_stages == (0, 1)


def test_manual_inherits_and_defaults() -> None:
    root = zoo.GPT(4)
    manual = {"blocks": 1, "blocks.3": 2, "head": 2}
    partition = plan(root, 3, manual=manual)
    assert dict(partition.stage_of) == {
        "wte": 0, "wpe": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2,
        "ln_f": 0, "head": 2,
    }  # fmt: skip
    assert partition.mode == "mirrored"
    assert partition.slowest is None


def test_manual_inside_an_atom_counts_if_it_covers() -> None:
    root = zoo.GPT(6)
    inside = {f"blocks.0.{name}": 1 for name, _ in root.blocks[0].named_children()}
    assert plan(root, 2, manual=inside).stage_of["blocks.0"] == 1
    with pytest.raises(PartitionError, match="never divided"):
        plan(root, 2, manual={"blocks.0": 0, "blocks.0.fc_1": 1})
    with pytest.raises(PartitionError, match="never divided"):
        plan(root, 2, manual={"blocks.0.fc_1": 1})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"manual": {"head": 3}}, "'head' is 3.*0 to 2"),
        ({"manual": {"head": -1}}, "is -1"),
        ({"manual": {"heed": 1}}, "Did you mean 'head'"),
        ({"manual": {}, "default_partition": 3}, "default_partition is 3"),
        ({"manual": {"head": 1}, "default_partition": None}, "7 modules have no stage.*'wte'"),
        ({"manual": {"head": 1}, "tied_parameters": "together"}, "wte.weight, head.weight"),
        ({"memory_weight": 1.5}, "memory_weight is 1.5"),
        ({"memory_limit": 10}, "memory limit of 10 bytes"),
    ],
)
def test_refusals(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        plan(zoo.GPT(4), 3, **kwargs)


def test_one_module_asked_for_twice_by_two_names() -> None:
    shared = nn.Linear(4, 4)
    root = nn.Sequential(shared, nn.ReLU(), shared)
    with pytest.raises(PartitionError, match="One module has one stage"):
        plan(root, 2, manual={"0": 0, "2": 1})
    assert plan(root, 2, manual={"2": 1}).stage_of["0"] == 1


def test_fingerprint_tells_placements_apart() -> None:
    root = zoo.GPT(4)
    same = plan(root, 2).fingerprint()
    assert same == plan(zoo.GPT(4), 2).fingerprint()
    assert len({same, plan(root, 3).fingerprint(), plan(root, 2, manual={}).fingerprint()}) == 3


def test_unequal_model_is_balanced_by_cost() -> None:
    """A large vocabulary and many tokens: the head weighs like many blocks."""
    root = zoo.GPT(8, dim=16, vocab=32768, tied=False)
    ids = torch.zeros(512, 8, dtype=torch.long)
    analysis = analyze(root, lambda net: zoo.gpt_step(net, ids), find_atoms(root))
    partition = plan(root, 2, analysis, memory_weight=0.0)
    last = [name for name in partition.atoms_on(1) if name.startswith("blocks")]
    assert len(last) < 4


@pytest.mark.parametrize(("layers", "num_stages", "virtual"), [(80, 16, 3), (30, 4, 3), (12, 4, 2)])
def test_virtual_stages_are_even_over_all_chunks(
    layers: int, num_stages: int, virtual: int
) -> None:
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    partition = plan(root, num_stages, virtual_stages=virtual)
    sizes = [len(partition.atoms_on(stage)) for stage in range(num_stages)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_stages", "virtual"), [(2, 2), (4, 2), (3, 4)])
def test_virtual_stages_are_contiguous_chunks_in_turn(num_stages: int, virtual: int) -> None:
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    partition = plan(root, num_stages, virtual_stages=virtual)
    visited = [stage for stage, _ in itertools.groupby(partition.stage_of.values())]
    assert visited == list(range(num_stages)) * virtual
    assert partition.virtual_stages == virtual
    share = max(len(partition.atoms_on(stage)) for stage in range(num_stages)) / 30
    assert partition.slowest == pytest.approx(share)


def test_virtual_stages_keep_the_memory_limit_of_a_stage() -> None:
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16)))
    layer = 4 * 4 * (4 * 4 + 4)  # value, gradient and two optimizer states of 20 floats
    plan(root, 2, virtual_stages=2, memory_limit=8 * layer)
    with pytest.raises(PartitionError, match="memory limit"):
        plan(root, 2, virtual_stages=2, memory_limit=7 * layer)


def test_virtual_stages_exclude_a_partition_by_hand() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"in turn \(0, 1, 0, 1\)"):
        plan(root, 2, virtual_stages=2, manual={"0": 0})
    with pytest.raises(PartitionError, match="there must be 1 or more"):
        plan(root, 2, virtual_stages=0)
