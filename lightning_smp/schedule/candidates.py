"""The orders that each kind of schedule chooses from: textbook ones and the list scheduler's.

Each order comes with a name that says how it was made. Textbook orders come before greedy ones, and
those that keep less alive before those that keep more: the earlier wins a full tie.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.greedy import Policy, list_schedule
from lightning_smp.schedule.orders import (
    Waves,
    merge_one_f_one_b,
    one_after_the_other,
    waves,
    weave_weights,
)
from lightning_smp.schedule.shape import (
    depth_limits,
    memory_per_microbatch,
    memory_per_segment,
    over_graphs,
    rank_sequence,
    roomy_limits,
    saturation_limits,
    visits,
    wave_priority,
)
from lightning_smp.schedule.work import Work

__all__ = ["Bounds", "Candidate", "interleaved", "simple", "zero_bubble"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the candidates are made for.

    Attributes:
        active: Most microbatches open at once.
        memory: Most memory alive on a rank, None for any.
    """

    active: int
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One order of the whole step; it may deadlock, or exceed a bound."""

    name: str
    work: Work
    orders: list[list[int]]


def simple(work: Work, graphs: Sequence[SegmentGraph]) -> Iterator[Candidate]:
    """Yield orders that execute all forwards, then all backwards."""
    unlimited = len(graphs)
    for group in _groups(graphs, (work.num_ranks, unlimited)):
        priority = wave_priority(work, group)
        textbook = one_after_the_other(waves(work, priority))
        yield Candidate(f"simple, groups of {group}", work, textbook)
        limits = [unlimited] * work.num_ranks
        policy = Policy(unlimited, limits, priority, forwards_first=True)
        greedy = list_schedule(work, policy)
        yield Candidate(f"simple, greedy, groups of {group}", work, greedy)


def interleaved(work: Work, graphs: Sequence[SegmentGraph], bounds: Bounds) -> Iterator[Candidate]:
    """Yield orders that execute backwards early.

    The groups and limits are those that a search over chains, loops, U shapes and U-Nets (2 to 8
    ranks, with and without transfer times, equal and unequal costs) found to cover each other.
    """
    shape = _Shape(work, graphs, bounds)
    for group, priority in shape.priorities.items():
        lists = waves(work, priority)
        for slots in shape.slots():
            orders = merge_one_f_one_b(work, lists, slots=slots, active=bounds.active)
            if orders is not None:
                yield Candidate(_name("1F1B", "alive", slots, group), work, orders)
    yield from _greedy(work, bounds, shape, shape.open_limits())


def zero_bubble(work: Work, graphs: Sequence[SegmentGraph], bounds: Bounds) -> Iterator[Candidate]:
    """Yield orders that fill idle time with the second parts of split backwards.

    The textbook one is ZB-H1 (Qi et al. 2023, arXiv 2401.10241): rank r, which under 1F1B keeps r
    fewer microbatches alive than rank 0, keeps r second parts for later instead. On virtual stages
    the same is done to interleaved 1F1B. The list scheduler's, in the manner of section 3 there,
    know costs and transfer times.
    """
    shape = _Shape(work, graphs, bounds)
    delays = list(range(work.num_ranks))
    for group, priority in shape.priorities.items():
        for slots in shape.slots():
            orders = _merge_split(work, waves(work, priority), slots)
            if orders is not None:
                woven = weave_weights(work, orders, delays)
                yield Candidate(_name("ZB-H1", "alive", slots, group), work, woven)
    level = [[max(shape.depths)] * work.num_ranks]
    yield from _greedy(work, bounds, shape, level + shape.open_limits())


def _merge_split(work: Work, lists: Waves, slots: Sequence[int]) -> list[list[int]] | None:
    """Merge forwards and first parts; second parts count as done with the first."""
    return merge_one_f_one_b(work, lists, slots=slots, active=work.num_microbatches)


class _Shape:
    """Limits and priorities that the graphs suggest."""

    def __init__(self, work: Work, graphs: Sequence[SegmentGraph], bounds: Bounds) -> None:
        self.depths = over_graphs(depth_limits, graphs)
        self.busy = over_graphs(saturation_limits, graphs)
        self.ceiling = min(bounds.active, len(graphs))
        sizes = (work.num_ranks, bounds.active // 2, bounds.active // 3, len(graphs))
        self.priorities = {group: wave_priority(work, group) for group in _groups(graphs, sizes)}
        self.fitting_slots: list[list[int]] = []
        self.fitting_open: list[list[int]] = []
        if bounds.memory is not None:
            per_segment = over_graphs(memory_per_segment, graphs)
            per_microbatch = over_graphs(memory_per_microbatch, graphs)
            most = sum(len(graph.segments) for graph in graphs)
            self.fitting_slots = [_that_fit(bounds.memory, per_segment, most)]
            fitting = _that_fit(bounds.memory, per_microbatch, len(graphs))
            self.fitting_open = [fitting, [1] * work.num_ranks]

    def slots(self) -> list[tuple[int, ...]]:
        """List, for each rank, segments that may be alive at once."""
        rows = [self.depths, roomy_limits(self.depths), self.busy]
        if self.fitting_slots:
            fit = self.fitting_slots[0]
            rows += [list(map(min, row, fit)) for row in rows] + [fit]
        return _distinct(rows)

    def open_limits(self) -> list[list[int]]:
        """List, for each rank, microbatches that may be open at once."""
        double = [2 * depth for depth in self.depths]
        rows = [self.depths, self.busy, double, [self.ceiling] * len(self.depths)]
        if self.fitting_open:
            fit = self.fitting_open[0]
            rows += [list(map(min, row, fit)) for row in rows]
        return [*rows, *self.fitting_open]


def _that_fit(limit: float, sizes: Sequence[float], most: int) -> list[int]:
    return [max(1, min(most, int(limit * (1.0 + 1e-9) / size))) if size else most for size in sizes]


def _greedy(
    work: Work, bounds: Bounds, shape: _Shape, rows: Iterable[Sequence[int]]
) -> Iterator[Candidate]:
    limits_to_try = _distinct([[min(n, shape.ceiling) for n in row] for row in rows])
    for group, priority in shape.priorities.items():
        for limits in limits_to_try:
            policy = Policy(bounds.active, limits, priority)
            orders = list_schedule(work, policy)
            yield Candidate(_name("greedy", "open", limits, group), work, orders)


def _groups(graphs: Sequence[SegmentGraph], sizes: Iterable[int]) -> list[int]:
    """Group sizes to try.

    Groups make a difference only where a rank is visited more than once, and keep microbatches in
    ascending order only where all pass the same ranks.
    """
    is_single_visit = max(over_graphs(visits, graphs)) <= 1
    if is_single_visit or len({rank_sequence(graph) for graph in graphs}) > 1:
        return [1]
    return list(dict.fromkeys([1, *(size for size in sizes if size >= 1)]))


def _distinct(rows: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(map(tuple, rows)))


def _name(kind: str, what: str, limits: Sequence[int], group: int) -> str:
    return f"{kind}, up to {' '.join(map(str, limits))} {what}, groups of {group}"
