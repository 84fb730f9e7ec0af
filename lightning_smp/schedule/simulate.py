"""Plays a schedule on imaginary ranks: when each action runs, what idles, what stays alive."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Action, Schedule, format_grid
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.work import FORWARD, KINDS, Work, build_work, split_by

__all__ = ["Run", "Span", "Timeline", "peaks", "play", "simulate"]


@dataclass(frozen=True, slots=True)
class Span:
    """One executed action, with the times of its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated step looks like.

    Attributes:
        name: Name of the schedule.
        ranks: For each rank, its actions with their times, in order.
        makespan: End of the last action of all; the step begins at 0.
        idle_share: For each rank, the part of the makespan it does not work (its bubble).
        peak_live: For each rank, the most segments at once whose forward was executed and whose
            backward is still to come (or, where it is split, the second part). It depends on the
            order only, not on the times.
        peak_memory: For each rank, likewise the most memory kept by segments alive at once.
    """

    name: str
    ranks: tuple[tuple[Span, ...], ...]
    makespan: float
    idle_share: tuple[float, ...]
    peak_live: tuple[int, ...]
    peak_memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Mean idle share over the ranks."""
        return sum(self.idle_share) / len(self.idle_share)


@dataclass(frozen=True, slots=True)
class Run:
    """Outcome of playing orders of named actions.

    Attributes:
        starts: Start of each action by name; meaningless where not executed.
        ends: End of each action by name, -1 where not executed.
        reached: For each rank, how many of its actions were executed.
        makespan: End of the last executed action.
    """

    starts: list[float]
    ends: list[float]
    reached: list[int]
    makespan: float

    def is_complete(self, orders: Sequence[Sequence[int]]) -> bool:
        """Tell whether no rank got stuck."""
        return all(done == len(order) for done, order in zip(self.reached, orders, strict=True))


def simulate(graphs: Sequence[SegmentGraph], schedule: Schedule) -> Timeline:
    """Play the schedule: each rank executes its list in order, as early as its inputs allow.

    Args:
        graphs: One graph per microbatch.
        schedule: The order of each rank; it may leave actions out (``validate`` may not).

    Raises:
        ScheduleError: If an action is unknown, doubled or on the wrong rank, or if the ranks
            deadlock; the message names the blocked action of each rank.
    """
    work = build_work(graphs, split=split_by(schedule))
    orders = work.encode(schedule)
    run = play(work, orders)
    if not run.is_complete(orders):
        raise ScheduleError(_describe_deadlock(work, schedule, orders, run))
    ranks = tuple(
        tuple(Span(work.actions[name], run.starts[name], run.ends[name]) for name in order)
        for order in orders
    )
    live, memory = peaks(work, orders)
    return Timeline(
        name=schedule.name,
        ranks=ranks,
        makespan=run.makespan,
        idle_share=tuple(_idle_share(work, order, run.makespan) for order in orders),
        peak_live=live,
        peak_memory=memory,
    )


def play(work: Work, orders: Sequence[Sequence[int]]) -> Run:
    """Execute the orders until all are done or every rank is stuck."""
    starts, ends = [0.0] * len(work.actions), [-1.0] * len(work.actions)
    clocks, reached = [0.0] * work.num_ranks, [0] * work.num_ranks
    waiting: dict[int, list[int]] = {}
    runnable = list(range(work.num_ranks))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while reached[rank] < len(order):
            name, start, missing = order[reached[rank]], clocks[rank], -1
            for need, delay in work.needs[name]:
                if ends[need] < 0.0:
                    missing = need
                    break
                start = max(start, ends[need] + delay)
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break
            starts[name] = start
            ends[name] = clocks[rank] = start + work.costs[name]
            reached[rank] += 1
            runnable += waiting.pop(name, ())
    return Run(starts, ends, reached, max(clocks))


def peaks(work: Work, orders: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Count, for each rank's order, the most segments alive at once and the most memory they keep.

    Only segments whose backward is in the order are alive at all.
    """
    found = [_rank_peaks(work, order) for order in orders]
    return tuple(live for live, _ in found), tuple(memory for _, memory in found)


def _rank_peaks(work: Work, order: Sequence[int]) -> tuple[int, float]:
    ends = {name // KINDS: name for name in order if work.is_last_use(name)}
    live, memory = most, largest = 0, 0.0
    for name in order:
        segment = name // KINDS
        if segment not in ends:
            continue
        if name == ends[segment]:
            live, memory = live - 1, memory - work.memory[name]
        elif name % KINDS == FORWARD:
            live, memory = live + 1, memory + work.memory[name]
            most, largest = max(most, live), max(largest, memory)
    return most, largest


def _idle_share(work: Work, order: Sequence[int], makespan: float) -> float:
    if makespan <= 0.0:
        return 0.0
    return max(0.0, 1.0 - sum(work.costs[name] for name in order) / makespan)


def _describe_deadlock(
    work: Work, schedule: Schedule, orders: Sequence[Sequence[int]], run: Run
) -> str:
    listed = {name for order in orders for name in order}
    marks = {}
    lines = []
    for rank, order in enumerate(orders):
        step = run.reached[rank]
        if step == len(order):
            continue
        marks[rank] = step
        missing = [need for need, _ in work.needs[order[step]] if run.ends[need] < 0.0]
        reasons = ", ".join(
            f"{work.actions[need]} on rank {work.ranks[need]}"
            + ("" if need in listed else " (which no rank executes)")
            for need in missing
        )
        lines.append(
            f"  rank {rank} is blocked at {work.actions[order[step]]}, waiting for {reasons}"
        )
    return (
        f"The schedule {schedule.name!r} deadlocks; reorder it so that every action comes after "
        "what it waits for:\n" + "\n".join(lines) + "\n" + format_grid(schedule, marks=marks)
    )
