"""Makes schedules: simulates the textbook orders and the list scheduler's and keeps the best.

Greedy alone loses to the textbook on virtual stages and holds too many activations; the textbook
alone knows neither costs nor graphs that are not loops. So both are candidates, and are judged by
the same simulation. Everything is deterministic: equal input gives an equal schedule on every rank.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Literal

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Schedule
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.greedy import Policy, list_schedule
from lightning_smp.schedule.orders import merge_one_f_one_b, one_after_the_other, waves
from lightning_smp.schedule.shape import (
    depth_limits,
    over_graphs,
    rank_sequence,
    saturation_limits,
    visits,
    wave_priority,
    with_known_costs,
)
from lightning_smp.schedule.simulate import peak_live, play
from lightning_smp.schedule.work import Work, build_work

__all__ = ["PipelineKind", "make_schedule"]

PipelineKind = Literal["simple", "interleaved"]

_SPARE_ACTIVE = 2  # microbatches beyond one per rank that may be open by default, as in SMP
_SAME_MAKESPAN = 1e-9  # relative; sums of equal costs in another order are a tie

_Candidate = tuple[str, list[list[int]]]


def make_schedule(
    graphs: Sequence[SegmentGraph],
    pipeline: PipelineKind,
    *,
    active_microbatches: int | None = None,
    forward_done: Set[int] = frozenset(),
    forward_only: bool = False,
) -> Schedule:
    """Order the forwards and backwards of a step on every rank.

    ``simple`` executes, on each rank, all forwards and then all backwards; it keeps every
    microbatch alive, whatever ``active_microbatches`` says. ``interleaved`` executes a backward
    before any forward where it shortens the step, and is 1F1B on a chain of equal costs. Of two
    orders with the same simulated makespan, the one with fewer live activations wins.

    On each rank, microbatches begin in ascending order; at most ``active_microbatches`` are begun
    and not finished there, counting those of ``forward_done``. Where no cost is known (all are
    zero), a backward counts as two forwards.

    Args:
        graphs: One segment graph per microbatch. Must be equal on all ranks, costs included.
        pipeline: Which kind of order.
        active_microbatches: The limit, at least 1; None stands for the number of ranks plus 2.
        forward_done: Microbatches whose forward was already executed on all ranks: only their
            backwards are scheduled.
        forward_only: Whether to leave out all backwards.

    Raises:
        ScheduleError: If an argument is out of range or the graphs do not fit together.
    """
    if pipeline not in ("simple", "interleaved"):
        raise ScheduleError(f"pipeline={pipeline!r}; choose 'simple' or 'interleaved'.")
    if active_microbatches is not None and active_microbatches < 1:
        raise ScheduleError(
            f"active_microbatches={active_microbatches}; at least one microbatch must be active."
        )
    graphs = with_known_costs(graphs)
    work = build_work(graphs, forward_done=forward_done, forward_only=forward_only)
    if pipeline == "simple":
        return _best(work, _simple(work, graphs))
    if active_microbatches is None:
        active_microbatches = work.num_ranks + _SPARE_ACTIVE
    return _best(work, _interleaved(work, graphs, active=active_microbatches))


def _simple(work: Work, graphs: Sequence[SegmentGraph]) -> Iterator[_Candidate]:
    unlimited = len(graphs)
    for group in _groups(graphs, (work.num_ranks, unlimited)):
        priority = wave_priority(work, group)
        yield f"simple, groups of {group}", one_after_the_other(waves(work, priority))
        limits = [unlimited] * work.num_ranks
        policy = Policy(unlimited, limits, priority, forwards_first=True)
        yield f"simple, greedy, groups of {group}", list_schedule(work, policy)


def _interleaved(
    work: Work, graphs: Sequence[SegmentGraph], *, active: int
) -> Iterator[_Candidate]:
    """Yield the textbook orders before the greedy ones: the earlier wins a full tie.

    The groups and limits are those that a search over chains, loops, U shapes and U-Nets (2 to 8
    ranks, with and without transfer times, equal and unequal costs) found to cover each other.
    """
    depths = over_graphs(depth_limits, graphs)
    busy = over_graphs(saturation_limits, graphs)
    # Twice the way to the last rank instead of once: room for transfers. On virtual stages this is
    # the warm-up of interleaved 1F1B (Narayanan et al. 2021).
    roomy = [depth + work.num_ranks - 1 - rank for rank, depth in enumerate(depths)]
    double = [2 * depth for depth in depths]
    groups = _groups(graphs, (work.num_ranks, active // 2, active // 3, len(graphs)))
    priorities = {group: wave_priority(work, group) for group in groups}
    for group, priority in priorities.items():
        lists = waves(work, priority)
        for slots in _distinct([depths, roomy, busy]):
            orders = merge_one_f_one_b(work, lists, slots=slots, active=active)
            if orders is not None:
                yield _name("1F1B", "alive", slots, group), orders
    ceiling = min(active, len(graphs))
    open_limits = [[min(n, ceiling) for n in row] for row in (depths, busy, double)]
    for group, priority in priorities.items():
        for limits in _distinct([*open_limits, [ceiling] * work.num_ranks]):
            policy = Policy(active, limits, priority)
            yield _name("greedy", "open", limits, group), list_schedule(work, policy)


def _groups(graphs: Sequence[SegmentGraph], sizes: Iterable[int]) -> list[int]:
    """Group sizes to try.

    Groups make a difference only where a rank is visited more than once, and keep microbatches in
    ascending order only where all pass the same ranks.
    """
    is_single_visit = max(over_graphs(visits, graphs)) <= 1
    if is_single_visit or len({rank_sequence(graph) for graph in graphs}) > 1:
        return [1]
    return list(dict.fromkeys([1, *(size for size in sizes if size >= 1)]))


def _distinct(rows: Iterable[list[int]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(map(tuple, rows)))


def _name(kind: str, what: str, limits: Sequence[int], group: int) -> str:
    return f"{kind}, up to {' '.join(map(str, limits))} {what}, groups of {group}"


def _best(work: Work, candidates: Iterable[_Candidate]) -> Schedule:
    """Keep the shortest candidate that does not deadlock; of equals, the one with fewer alive."""
    best: tuple[float, tuple[int, int], _Candidate] | None = None
    for candidate in candidates:
        orders = candidate[1]
        run = play(work, orders)
        if not run.is_complete(orders):
            continue
        peaks = peak_live(orders)
        live = (max(peaks), sum(peaks))
        is_better = best is None or run.makespan < best[0] * (1.0 - _SAME_MAKESPAN)
        if not is_better and best is not None:
            is_better = run.makespan <= best[0] * (1.0 + _SAME_MAKESPAN) and live < best[1]
        if is_better:
            best = (run.makespan, live, candidate)
    assert best is not None, "the list scheduler never deadlocks"
    name, orders = best[2]
    return work.decode(orders, name=name)
