"""The tree partition against its rule, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning import Item, analyze, find_atoms, plan_partition
from lightning_smp.partitioning.tree import solve_tree
from tests.partitioning.zoo import GPT, gpt_step


def stages(costs: dict[str, float], num_stages: int) -> list[int]:
    items = [Item(cost=cost, memory=0) for cost in costs.values()]
    return solve_tree(list(costs), items, num_stages, 0.0).stages


def test_equal_children_are_dealt_out_evenly() -> None:
    assert stages({f"layers.{i}": 1 for i in range(8)}, 4) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_stages_go_to_runs_in_proportion_by_dhondt() -> None:
    # Runs (a) 2 and (b) 6 for 4 stages: quotients 6, 3, 2 | 2, ... give b three and a one.
    costs = {"a": 2, "b.0": 2, "b.1": 2, "b.2": 2}
    assert stages(costs, 4) == [0, 1, 2, 3]


def test_a_run_without_a_stage_goes_to_the_parents_first() -> None:
    # Runs 1 and 7 for 2 stages: quotients 7, 3.5 | 1, so both stages go to the second run.
    costs = {"small": 1, "big.0": 4, "big.1": 3}
    assert stages(costs, 2) == [0, 0, 1]


def test_children_of_different_depth_are_not_cut_across_their_parent() -> None:
    # The exact split in order, 3 | 3, would cut inside `left`; the tree cuts between its children.
    costs = {"left.0": 1, "left.1": 1, "left.2": 1, "left.3": 1, "right": 2}
    assert stages(costs, 2) == [0, 0, 0, 0, 1]


def test_a_long_chain_of_single_children_is_gone_into() -> None:
    assert stages({"a.b.c.0": 1, "a.b.c.1": 1}, 2) == [0, 1]


def test_more_stages_than_items_leaves_stages_empty() -> None:
    assert stages({"a": 1, "b": 1}, 4) == [0, 2]
    assert stages({"only": 1}, 3) == [0]


def test_memory_weighs_as_asked() -> None:
    items = [Item(cost=c, memory=m) for c, m in ((3, 1), (1, 1), (1, 1), (1, 3))]
    names = list("abcd")
    assert solve_tree(names, items, 2, 0.0).stages == [0, 1, 1, 1]
    assert solve_tree(names, items, 2, 1.0).stages == [0, 0, 0, 1]


def test_ties_are_one_node_unless_mirrored() -> None:
    def item(group: int | None) -> Item:
        return Item(cost=1, memory=1, tie_group=group, shared_memory=1 if group else 0)

    items = [item(1), item(None), item(None), item(1)]
    together = solve_tree(list("abcd"), items, 2, 0.0)
    assert (together.stages, together.tied) == ([0, 1, 1, 0], "together")
    mirrored = solve_tree(list("abcd"), items, 2, 0.0, tied="mirrored")
    assert (mirrored.stages, mirrored.tied) == ([0, 0, 1, 1], "mirrored")


def test_over_the_memory_limit_is_refused_with_the_other_policy() -> None:
    items = [Item(cost=1, memory=10), Item(cost=1, memory=1)]
    with pytest.raises(PartitionError, match=r"10 bytes.*limit of 5.*'contiguous'"):
        solve_tree(["a", "b"], items, 2, 0.0, 5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=12
    ),
    st.integers(1, 6),
)
def test_every_item_gets_a_stage_and_the_same_one_again(
    rows: list[tuple[int, int, int]], num_stages: int
) -> None:
    names = [f"{a}.{b}.{index}" for index, (a, b, _) in enumerate(rows)]
    items = [Item(cost=cost, memory=cost) for _, _, cost in rows]
    first = solve_tree(names, items, num_stages, 0.3)
    assert all(0 <= stage < num_stages for stage in first.stages)
    assert first == solve_tree(names, items, num_stages, 0.3)


def test_the_policy_of_a_plan() -> None:
    torch.manual_seed(1)
    model = GPT(layers=8, tied=True)
    atoms = find_atoms(model)
    ids = torch.zeros(2, 8, dtype=torch.long)
    analysis = analyze(model, lambda copied: gpt_step(copied, ids), atoms)
    partition = plan_partition(model, analysis, atoms, 2, memory_weight=0.5, policy="tree")
    assert partition.mode == "together"
    assert partition.stage_of["wte"] == partition.stage_of["head"]
    assert set(partition.stage_of.values()) == {0, 1}
    with pytest.raises(PartitionError, match="'tree', which knows none"):
        plan_partition(
            model, analysis, atoms, 2, memory_weight=0.5, policy="tree", virtual_stages=2
        )


def test_a_layer_that_is_never_called_is_placed_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_module("unused", nn.Linear(4, 4))
    atoms = find_atoms(model)
    analysis = analyze(model, lambda copied: copied[1](copied[0](torch.ones(1, 4))), atoms)
    partition = plan_partition(model, analysis, atoms, 2, memory_weight=0.5, policy="tree")
    assert set(partition.stage_of) == {"0", "1", "unused"}
