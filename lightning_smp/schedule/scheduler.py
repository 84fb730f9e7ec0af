"""Makes schedules: simulates the textbook orders and the list scheduler's and keeps the best.

Greedy alone loses to the textbook on virtual stages and holds too many activations; the textbook
alone knows neither costs nor graphs that are not loops. So both are candidates, and are judged by
the same simulation. Everything is deterministic: equal input gives an equal schedule on every rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Schedule
from lightning_smp.schedule.candidates import (
    Bounds,
    Candidate,
    interleaved,
    simple,
    zero_bubble,
)
from lightning_smp.schedule.fuse import fuse_parts
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.shape import (
    depth_limits,
    loops,
    over_graphs,
    roomy_limits,
    shortest_step,
    with_known_costs,
)
from lightning_smp.schedule.simulate import peaks, play
from lightning_smp.schedule.work import Work, build_work, every_split

__all__ = ["PipelineKind", "make_schedule"]

PipelineKind = Literal["simple", "interleaved", "zero_bubble", "auto"]

_SPARE_ACTIVE = 2  # microbatches beyond one per rank that may be open by default, as in SMP
_SAME = 1e-9  # relative; sums of equal costs in another order are a tie
_SPLIT_GAIN = 0.01  # a step must get this much shorter for "auto" to execute twice as many actions


def make_schedule(
    graphs: Sequence[SegmentGraph],
    pipeline: PipelineKind,
    *,
    active_microbatches: int | None = None,
    memory_limit: float | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Order the forwards and backwards of a step on every rank.

    ``simple`` executes, on each rank, all forwards and then all backwards; it keeps every
    microbatch alive, whatever ``active_microbatches`` says. ``interleaved`` executes a backward
    before any forward where it shortens the step; it is 1F1B on a chain of equal costs and
    interleaved 1F1B on virtual stages. ``zero_bubble`` splits backwards and fills idle time with
    the parts that nothing waits for. ``auto`` is the one with the shortest simulated step; a split
    must gain 1 %. Of two orders with the same simulated step, the one that keeps fewer segments
    alive wins.

    On each rank, microbatches begin in ascending order; at most ``active_microbatches`` are begun
    and not finished there. Where no cost is known (all are zero), a backward counts as two
    forwards, half of it for the parameters.

    Args:
        graphs: One segment graph per microbatch. Must be equal on all ranks, costs included.
        pipeline: Which kind of order.
        active_microbatches: The limit, at least 1. None: the number of ranks plus 2, or twice the
            number of ranks with virtual stages; and on chains and loops no more segments alive than
            under the textbook order of virtual stages or of ``zero_bubble``.
        memory_limit: Most memory that the segments alive on a rank may keep, in the unit of
            :attr:`Segment.memory`; None for any.
        forward_only: Whether to leave out all backwards.

    Raises:
        ScheduleError: If an argument is out of range, the graphs do not fit together, or every
            order needs more memory than ``memory_limit``.
    """
    _check_request(pipeline, active_microbatches, memory_limit)
    graphs = with_known_costs(graphs)
    work = build_work(graphs, forward_only=forward_only)
    split = every_split(graphs) if pipeline in ("zero_bubble", "auto") and not forward_only else ()
    parts = build_work(graphs, split=frozenset(split)) if split else work
    choice = _Choice(work, parts, graphs, active_microbatches, memory_limit)
    best = choice.make(pipeline).candidate
    schedule = best.work.decode(best.orders, name=best.name)
    return schedule if best.work is work else fuse_parts(graphs, schedule)


def _check_request(pipeline: str, active: int | None, memory_limit: float | None) -> None:
    kinds = get_args(PipelineKind)
    if pipeline not in kinds:
        known = ", ".join(map(repr, kinds[:-1]))
        raise ScheduleError(f"pipeline={pipeline!r}; choose {known} or {kinds[-1]!r}.")
    if active is not None and active < 1:
        raise ScheduleError(
            f"active_microbatches={active}; at least one microbatch must be active."
        )
    if memory_limit is not None and not memory_limit >= 0.0:
        raise ScheduleError(f"memory_limit={memory_limit}; it must not be negative.")


@dataclass(frozen=True, slots=True)
class _Played:
    """A candidate after its simulation."""

    candidate: Candidate
    makespan: float
    live: tuple[int, ...]
    memory: tuple[float, ...]

    def is_better(self, other: "_Played | None", *, gain: float = 0.0) -> bool:
        """Tell whether this one is shorter by the gain, or as short and keeps fewer alive."""
        if other is None or self.makespan < other.makespan * (1.0 - gain) * (1.0 - _SAME):
            return True
        if gain or self.makespan > other.makespan * (1.0 + _SAME):
            return False
        return (max(self.live), sum(self.live)) < (max(other.live), sum(other.live))


class _Choice:
    """One choice among all orders of a step."""

    def __init__(
        self,
        work: Work,
        parts: Work,
        graphs: Sequence[SegmentGraph],
        active: int | None,
        memory_limit: float | None,
    ) -> None:
        self.work, self.parts = work, parts
        self.graphs = graphs
        self.num_loops = loops(graphs)
        self.is_default = active is None and memory_limit is None
        if active is None:
            spare = work.num_ranks if self.num_loops > 1 else _SPARE_ACTIVE
            active = work.num_ranks + max(spare, _SPARE_ACTIVE)
        self.bounds = Bounds(active, memory_limit)
        self.least: float | None = None

    def make(self, pipeline: PipelineKind) -> _Played:
        """Return the best order of a kind."""
        if pipeline == "simple":
            best = self._best(simple(self.work, self.graphs))
        elif pipeline == "interleaved":
            best = self._interleaved()
        elif pipeline == "zero_bubble":
            best = self._zero_bubble() or self._interleaved()
        else:
            best = self._auto()
        if best is None:
            raise ScheduleError(
                f"Every {pipeline!r} order of the {len(self.graphs)} microbatches keeps more "
                f"activations alive than the limit of {self.bounds.memory:g}; the least found is "
                f"{self.least:.12g}. Raise the limit to that, or make the microbatches smaller."
            )
        return best

    def _interleaved(self) -> _Played | None:
        """Backwards early, unsplit; within the textbook's live segments on virtual stages."""
        live = self._textbook_live(delayed=False) if self.num_loops > 1 else None
        made = interleaved(self.work, self.graphs, self.bounds)
        return self._best(made, live)

    def _zero_bubble(self) -> _Played | None:
        if self.parts is self.work:
            return None
        live = self._textbook_live(delayed=True) if self.num_loops else None
        made = zero_bubble(self.parts, self.graphs, self.bounds)
        return self._best(filter(self._observes_active, made), live)

    def _auto(self) -> _Played | None:
        best = self._interleaved()
        made = simple(self.work, self.graphs)
        for one in self._played(filter(self._observes_active, made)):
            best = one if one.is_better(best) else best
        split = self._zero_bubble()
        return split if split and split.is_better(best, gain=_SPLIT_GAIN) else best

    def _observes_active(self, candidate: Candidate) -> bool:
        work, orders = candidate.work, candidate.orders
        return all(_most_open(work, order) <= self.bounds.active for order in orders)

    def _textbook_live(self, *, delayed: bool) -> list[int] | None:
        """Segments that the textbook order keeps alive on each rank of a chain or loop."""
        if not self.is_default:
            return None
        depths = over_graphs(depth_limits, self.graphs)
        slots = roomy_limits(depths) if self.num_loops > 1 else depths
        return [n + rank * delayed for rank, n in enumerate(slots)]

    def _best(
        self, candidates: Iterable[Candidate], live: Sequence[int] | None = None
    ) -> _Played | None:
        """Keep the shortest candidate within the bounds; of equals, the one with fewer alive."""
        best: _Played | None = None
        within = False
        enough = -1.0
        for one in self._played(candidates):
            if enough < 0.0:
                enough = shortest_step(one.candidate.work, self.graphs) * (1.0 + _SAME)
            fits = live is None or all(map(int.__le__, one.live, live))
            if fits > within or (fits == within and one.is_better(best)):
                best, within = one, fits
            if fits and one.makespan <= enough and self.num_loops:
                break
        return best

    def _played(self, candidates: Iterable[Candidate]) -> Iterator[_Played]:
        """Yield the candidates that do not deadlock and keep the memory limit."""
        limit = self.bounds.memory
        for candidate in candidates:
            run = play(candidate.work, candidate.orders)
            if not run.is_complete(candidate.orders):
                continue
            live, memory = peaks(candidate.work, candidate.orders)
            most = max(memory)
            self.least = most if self.least is None else min(self.least, most)
            if limit is None or most <= limit * (1.0 + _SAME):
                yield _Played(candidate, run.makespan, live, memory)


def _most_open(work: Work, order: Sequence[int]) -> int:
    """Count the most microbatches at once that were begun and are not finished."""
    left = Counter(work.actions[name].microbatch for name in order)
    is_open: set[int] = set()
    most = 0
    for name in order:
        microbatch = work.actions[name].microbatch
        is_open.add(microbatch)
        most = max(most, len(is_open))
        left[microbatch] -= 1
        if not left[microbatch]:
            is_open.discard(microbatch)
    return most
