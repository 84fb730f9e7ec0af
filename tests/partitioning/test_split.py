"""The split is optimal: compared with brute force on small problems."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_smp.errors import PartitionError
from lightning_smp.partitioning.split import Item, solve, split, stage_costs

number = st.one_of(st.integers(0, 9), st.floats(0, 9, allow_nan=False, allow_subnormal=False))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Item], int, float]:
    items = []
    for _ in range(draw(st.integers(1, 6))):
        memory = draw(number)
        group = draw(st.sampled_from([None, None, "a", "b"]))
        items.append(Item(draw(number), memory, group, 1.0 if group and memory >= 1 else 0.0))
    return items, draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))


def _memories(items: list[Item], stages: tuple[int, ...], num_stages: int) -> list[float]:
    memories = [0.0] * num_stages
    shared: dict[tuple[int, object], float] = {}
    largest: dict[object, float] = {}
    for item in items:
        if item.tie_group:
            largest[item.tie_group] = max(largest.get(item.tie_group, 0.0), item.shared_memory)
    for item, stage in zip(items, stages, strict=True):
        memories[stage] += item.memory
        if item.tie_group:
            memories[stage] -= item.shared_memory
            shared[stage, item.tie_group] = largest[item.tie_group]
    for (stage, _), extra in shared.items():
        memories[stage] += extra
    return memories


def _brute(
    items: list[Item], num_stages: int, weight: float, tied: str, limit: float | None = None
) -> float | None:
    counts: dict[object, int] = {}
    for item in items:
        counts[item.tie_group] = counts.get(item.tie_group, 0) + 1
    bound = [tied == "together" and i.tie_group and counts[i.tie_group] > 1 for i in items]
    best: float | None = None
    for stages in itertools.product(range(num_stages), repeat=len(items)):
        free = [s for s, b in zip(stages, bound, strict=True) if not b]
        if free != sorted(free):
            continue
        homes: dict[object, set[int]] = {}
        for item, stage, b in zip(items, stages, bound, strict=True):
            if b:
                homes.setdefault(item.tie_group, set()).add(stage)
        if any(len(home) > 1 for home in homes.values()):
            continue
        if limit is not None and max(_memories(items, stages, num_stages)) > limit:
            continue
        value = max(stage_costs(items, stages, num_stages, weight))
        best = value if best is None else min(best, value)
    return best


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(["together", "mirrored"]))
def test_optimal(problem: tuple[list[Item], int, float], tied: str) -> None:
    items, num_stages, weight = problem
    found = solve(items, num_stages, weight, tied=tied)
    assert found.slowest == pytest.approx(_brute(items, num_stages, weight, tied), rel=1e-8)
    actual = stage_costs(items, found.stages, num_stages, weight)
    assert max(actual) == pytest.approx(found.slowest, rel=1e-8)
    if tied == "mirrored":
        assert found.stages == sorted(found.stages)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(["together", "mirrored"]), st.integers(0, 30))
def test_memory_limit(problem: tuple[list[Item], int, float], tied: str, limit: int) -> None:
    items, num_stages, weight = problem
    expected = _brute(items, num_stages, weight, tied, limit)
    if expected is None:
        with pytest.raises(PartitionError, match="memory limit"):
            solve(items, num_stages, weight, limit, tied=tied)
        return
    found = solve(items, num_stages, weight, limit, tied=tied)
    assert found.slowest == pytest.approx(expected, rel=1e-8)
    assert max(_memories(items, tuple(found.stages), num_stages)) <= limit + 1e-6


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(["auto", "together", "mirrored"]))
def test_no_needless_empty_stage(problem: tuple[list[Item], int, float], tied: str) -> None:
    items, num_stages, weight = problem
    found = solve(items, num_stages, weight, tied=tied)
    members: dict[object, int] = {}
    for item in items:
        members[item.tie_group] = members.get(item.tie_group, 0) + 1
    movable = len(items)
    if found.tied == "together":
        movable = sum(n if g is None or n == 1 else 1 for g, n in members.items())
    if tied != "auto" and movable >= num_stages and found.tied == "mirrored":
        assert set(found.stages) == set(range(num_stages))
    assert len(set(found.stages)) <= num_stages


@settings(max_examples=100, deadline=None)
@given(problems())
def test_auto_takes_the_faster_and_prefers_mirrored(problem: tuple[list[Item], int, float]) -> None:
    items, num_stages, weight = problem
    together = solve(items, num_stages, weight, tied="together").slowest
    mirrored = solve(items, num_stages, weight, tied="mirrored").slowest
    found = solve(items, num_stages, weight)
    assert found.slowest == pytest.approx(min(together, mirrored), rel=1e-8)
    if mirrored <= together:
        assert found.tied == "mirrored"


def test_balances_the_stages_that_are_not_slowest() -> None:
    items = [Item(10, 0), *(Item(1, 0) for _ in range(4))]
    assert split(items, 3, 0.0) == [0, 1, 1, 2, 2]


def test_weights_compute_against_memory() -> None:
    items = [Item(6, 1), Item(1, 1), Item(1, 1), Item(1, 6)]
    assert split(items, 2, 0.0) == [0, 1, 1, 1]
    assert split(items, 2, 1.0) == [0, 0, 0, 1]


def test_together_waives_order_for_the_group_only() -> None:
    tie = "wte"
    items = [Item(1, 5, tie, 5), *(Item(4, 1) for _ in range(4)), Item(2, 5, tie, 5)]
    stages = split(items, 2, 0.2, tied="together")
    assert stages[0] == stages[-1]
    assert stages[1:-1] == sorted(stages[1:-1])


def test_fewer_items_than_stages() -> None:
    assert split([Item(1, 1), Item(1, 1)], 4, 0.5) == [0, 1]


def test_no_items_and_zero_costs() -> None:
    assert split([], 3, 0.5) == []
    assert set(split([Item(0, 0)] * 4, 2, 0.5)) == {0, 1}


def test_refusals_name_the_fix() -> None:
    with pytest.raises(PartitionError, match="needs 6 bytes"):
        split([Item(1, 6), Item(1, 1)], 2, 0.0, 5)
    with pytest.raises(PartitionError, match="at least 1"):
        split([], 0, 0.0)
    with pytest.raises(PartitionError, match="between 0"):
        split([], 1, 2.0)


def test_large_problem_is_fast() -> None:
    items = [Item(1 + i % 7, 1 + i % 5) for i in range(1000)]
    items[0] = Item(3, 9, "t", 9)
    items[-1] = Item(9, 9, "t", 9)
    start = time.process_time()
    stages = split(items, 32, 0.5, tied="auto")
    assert time.process_time() - start < 30
    assert set(stages) == set(range(32))
