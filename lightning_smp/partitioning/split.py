"""The exact contiguous split of items over stages. Pure: numbers in, stage numbers out.

Note [How the split is solved]
A stage's cost is a weighted sum of its share of all compute and its share of all memory. For items
that stay in order, the smallest possible cost of the slowest stage is found by threshold search:
filling the stages greedily from the left up to a cap succeeds exactly if any split respects the
cap, since costs only grow with more items. The search ends when no cap below the best split's own
cost can be met, so the result is exact, not approximate. Many splits share that optimum (one large
item leaves the rest free), so dynamic programming then picks, among those that respect it, the one
with the smallest sum of squares.

Tied groups under ``together``: each assignment of groups to stages gives the stages a load to start
with, and the remaining items are split in order around it. All assignments are tried while there
are at most ``_MAX_ASSIGNMENTS``; beyond, groups are moved one at a time until no move helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_smp.errors import PartitionError

__all__ = ["Item", "Split", "solve", "split", "stage_costs", "stage_memories"]

Tied = Literal["auto", "together", "mirrored"]

_MAX_ASSIGNMENTS = 1024
_REL_TOL = 1e-9


@dataclass(frozen=True)
class Item:
    """Something that goes to one stage as a whole.

    Attributes:
        cost: Compute, in any unit, not negative.
        memory: Bytes, including ``shared_memory``, not negative.
        tie_group: Items of equal groups share parameters; None: shares nothing.
        shared_memory: The part of ``memory`` that a stage holds once for all members of the group.
        is_inseparable: The whole group stays on one stage even if ``mirrored``.
    """

    cost: float
    memory: float
    tie_group: Hashable | None = None
    shared_memory: float = 0.0
    is_inseparable: bool = False


@dataclass(frozen=True)
class Split:
    """A solution.

    Attributes:
        stages: Stage of each item.
        tied: How tied items were treated.
        slowest: Weighted cost of the slowest stage, as a share (0 to 1) of the whole.
    """

    stages: list[int]
    tied: Literal["together", "mirrored"]
    slowest: float


def split(
    items: Sequence[Item],
    num_stages: int,
    memory_weight: float,
    memory_limit: float | None = None,
    *,
    tied: Tied = "auto",
) -> list[int]:
    """Returns the stage of each item; see :func:`solve`."""
    return solve(items, num_stages, memory_weight, memory_limit, tied=tied).stages


def solve(
    items: Sequence[Item],
    num_stages: int,
    memory_weight: float,
    memory_limit: float | None = None,
    *,
    tied: Tied = "auto",
) -> Split:
    """Splits items, given in execution order, so that the slowest stage is as fast as possible.

    Stages never decrease along the items, except that under ``together`` the members of a tie group
    are all on the stage that is best for them. No stage is left empty if there are items enough.

    Args:
        items: In execution order.
        num_stages: At least 1.
        memory_weight: From 0 (compute alone counts) to 1 (memory alone counts).
        memory_limit: Most bytes that a stage may hold.
        tied: ``together``, ``mirrored`` (members go anywhere, each stage with one holds a copy), or
            ``auto``: whichever gives the faster slowest stage; mirrored if equal.

    Raises:
        PartitionError: Under the memory limit there is no solution, or an argument is out of range.
    """
    _check(num_stages, memory_weight)
    modes: tuple[Literal["mirrored", "together"], ...] = (
        ("mirrored", "together") if tied == "auto" else (tied,)
    )
    if tied == "auto" and _groups(items, "mirrored") == _groups(items, "together"):
        modes = ("mirrored",)  # nothing is tied that may be apart
    best: Split | None = None
    for mode in modes:
        found = _solve(items, num_stages, memory_weight, memory_limit, mode)
        if found is None:
            continue
        if best is None or found.slowest < best.slowest * (1 - _REL_TOL):
            best = found
    if best is None:
        raise _does_not_fit(items, num_stages, memory_limit, modes[0])
    return best


def stage_costs(
    items: Sequence[Item], stages: Sequence[int], num_stages: int, memory_weight: float
) -> list[float]:
    """Returns the weighted cost of each stage, as shares (0 to 1) of the whole."""
    costs = _Costs(items, memory_weight, math.inf)
    members: list[list[int]] = [[] for _ in range(num_stages)]
    for index, stage in enumerate(stages):
        members[stage].append(index)
    return [costs.load(indices).weight for indices in members]


def _check(num_stages: int, memory_weight: float) -> None:
    if num_stages < 1:
        raise PartitionError(
            f"Asked to split a model over {num_stages} stages. The number must be at least 1: "
            "use 1 to keep the model whole."
        )
    if not 0 <= memory_weight <= 1:
        raise PartitionError(
            f"memory_weight is {memory_weight}. It must lie between 0 (compute alone) and 1 "
            "(memory alone): use 0.2 to favour speed, 0.8 to favour memory."
        )


def _does_not_fit(
    items: Sequence[Item], num_stages: int, memory_limit: float | None, mode: str
) -> PartitionError:
    assert memory_limit is not None  # without a limit every split is a solution
    free = _solve(items, num_stages, 1.0, None, mode)
    assert free is not None
    needed = max(stage_memories(items, free.stages, num_stages))
    return PartitionError(
        f"No split of the model over {num_stages} stages keeps every stage within the memory "
        f"limit of {memory_limit:.0f} bytes; the best one needs {needed:.0f} bytes on its fullest "
        "stage. Raise the limit to that, use more stages, or make the microbatches smaller."
    )


def stage_memories(items: Sequence[Item], stages: Sequence[int], num_stages: int) -> list[float]:
    """Returns the bytes that each stage holds, what a group shares counted once a stage."""
    costs = _Costs(items, 1.0, math.inf)
    return [
        costs.load([i for i, s in enumerate(stages) if s == stage]).memory
        for stage in range(num_stages)
    ]


@dataclass(frozen=True)
class _Load:
    """What a stage holds so far: weighted share, bytes, and the groups already paid for."""

    weight: float = 0.0
    memory: float = 0.0
    groups: frozenset[Hashable] = frozenset()
    is_empty: bool = True


class _Costs:
    """Weighted costs of item sets, with a group's shared memory counted once a stage."""

    def __init__(self, items: Sequence[Item], memory_weight: float, limit: float) -> None:
        self._items = items
        self._limit = limit
        total_cost = sum(item.cost for item in items)
        groups: dict[Hashable, float] = {}
        for item in items:
            if item.tie_group is not None:
                groups[item.tie_group] = max(groups.get(item.tie_group, 0.0), item.shared_memory)
        self._shared = groups
        own = sum(i.memory - (i.shared_memory if i.tie_group is not None else 0.0) for i in items)
        total_memory = own + sum(groups.values())
        self._cost_scale = (1 - memory_weight) / total_cost if total_cost > 0 else 0.0
        self._memory_scale = memory_weight / total_memory if total_memory > 0 else 0.0

    def add(self, load: _Load, index: int) -> _Load:
        item = self._items[index]
        memory = item.memory
        groups = load.groups
        if item.tie_group is not None:
            memory -= item.shared_memory
            if item.tie_group not in groups:
                memory += self._shared[item.tie_group]
                groups = groups | {item.tie_group}
        weight = item.cost * self._cost_scale + memory * self._memory_scale
        return _Load(load.weight + weight, load.memory + memory, groups, is_empty=False)

    def load(self, indices: Sequence[int]) -> _Load:
        load = _Load()
        for index in indices:
            load = self.add(load, index)
        return load

    def fits(self, load: _Load, cap: float) -> bool:
        return load.weight <= cap and load.memory <= self._limit


def _solve(
    items: Sequence[Item],
    num_stages: int,
    memory_weight: float,
    memory_limit: float | None,
    mode: str,
) -> Split | None:
    limit = math.inf if memory_limit is None else memory_limit
    costs = _Costs(items, memory_weight, limit)
    groups = _groups(items, mode)
    tied = {index for group in groups for index in group}
    free = [index for index in range(len(items)) if index not in tied]
    best: tuple[float, tuple[int, ...]] | None = None
    for assignment in _assignments(groups, num_stages, costs, free):
        bases = _bases(groups, assignment, num_stages, costs)
        cap = _optimum(free, bases, costs, math.inf if best is None else best[0])
        if cap is not None:
            best = (cap, assignment)
    if best is None:
        return None
    cap, assignment = best
    stages = [0] * len(items)
    for group, stage in zip(groups, assignment, strict=True):
        for index in group:
            stages[index] = stage
    chosen = _balance(free, _bases(groups, assignment, num_stages, costs), costs, cap)
    for index, stage in zip(free, chosen, strict=True):
        stages[index] = stage
    return Split(stages, "together" if mode == "together" else "mirrored", cap)


def _groups(items: Sequence[Item], mode: str) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        if item.tie_group is not None:
            groups.setdefault(item.tie_group, []).append(index)
    return [
        group
        for group in groups.values()
        if len(group) > 1
        and (mode == "together" or any(items[index].is_inseparable for index in group))
    ]


def _bases(
    groups: list[list[int]], assignment: tuple[int, ...], num_stages: int, costs: _Costs
) -> list[_Load]:
    loads = [_Load() for _ in range(num_stages)]
    for group, stage in zip(groups, assignment, strict=True):
        for index in group:
            loads[stage] = costs.add(loads[stage], index)
    return loads


def _assignments(
    groups: list[list[int]], num_stages: int, costs: _Costs, free: list[int]
) -> Iterator[tuple[int, ...]]:
    """Yields the assignments to try: all of them, or those met when moving one group at a time."""
    if num_stages ** len(groups) <= _MAX_ASSIGNMENTS:
        yield from itertools.product(range(num_stages), repeat=len(groups))
        return
    current = [0] * len(groups)
    best = math.inf
    improved = True
    while improved:
        improved = False
        for position, stage in itertools.product(range(len(groups)), range(num_stages)):
            trial = (*current[:position], stage, *current[position + 1 :])
            bases = _bases(groups, trial, num_stages, costs)
            cap = _optimum(free, bases, costs, best)
            if cap is not None:
                best, current, improved = cap, list(trial), True
                yield trial


def _optimum(
    free: Sequence[int], bases: Sequence[_Load], costs: _Costs, below: float
) -> float | None:
    """Returns the smallest cap that can be met, or None if none below ``below``."""
    start = below * (1 - _REL_TOL) if below < math.inf else math.inf
    best = _fill(free, bases, costs, start)
    if best is None:
        return None
    low = 0.0
    while low < best:
        middle = (low + best) / 2
        if middle <= low or middle >= best:
            middle = math.nextafter(best, -math.inf)
            if middle <= low:
                return best
        found = _fill(free, bases, costs, middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


def _fill(free: Sequence[int], bases: Sequence[_Load], costs: _Costs, cap: float) -> float | None:
    """Fills stages from the left up to a cap; returns the slowest's cost, None if it fails."""
    if not all(costs.fits(base, cap) for base in bases):
        return None
    slowest = max(base.weight for base in bases)
    stage, load = 0, bases[0]
    for index in free:
        grown = costs.add(load, index)
        while not costs.fits(grown, cap):
            stage += 1
            if stage == len(bases):
                return None
            grown = costs.add(bases[stage], index)
        load = grown
        slowest = max(slowest, load.weight)
    return slowest


def _balance(free: Sequence[int], bases: Sequence[_Load], costs: _Costs, cap: float) -> list[int]:
    """Returns the stages of the free items with the smallest sum of squared costs under the cap.

    ``best[j]`` is for the first j items on the stages up to the current one. A stage may stay empty
    only if it holds tied items already or there are too few items for all.
    """
    cap *= 1 + _REL_TOL
    num_empty = sum(base.is_empty for base in bases)
    may_skip = len(free) < num_empty
    best = [0.0] + [math.inf] * len(free)
    cuts: list[list[int]] = []
    for base in bases:
        best, cut = _extend(free, best, costs, base, cap, may_skip or not base.is_empty)
        cuts.append(cut)
    assert best[-1] < math.inf
    stages = [0] * len(free)
    end = len(free)
    for stage in reversed(range(len(bases))):
        start = cuts[stage][end]
        stages[start:end] = [stage] * (end - start)
        end = start
    return stages


def _extend(
    free: Sequence[int],
    best: list[float],
    costs: _Costs,
    base: _Load,
    cap: float,
    may_skip: bool,
) -> tuple[list[float], list[int]]:
    """One stage of the dynamic program: from each reachable prefix, take as many items as fit."""
    result = [math.inf] * len(best)
    cut = [0] * len(best)
    for start, value in enumerate(best):
        if value == math.inf:
            continue
        load = base
        for end in range(start if may_skip else start + 1, len(best)):
            if end > start:
                load = costs.add(load, free[end - 1])
            if not costs.fits(load, cap):
                break
            total = value + load.weight**2
            # An empty stage wins equals: with too few items the last stages are the empty ones.
            if total < result[end] or (start == end and total == result[end]):
                result[end], cut[end] = total, start
    return result, cut
