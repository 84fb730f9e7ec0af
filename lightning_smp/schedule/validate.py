"""Proves that a schedule is fit to be executed, or says what is wrong with it and where."""

from collections import Counter
from collections.abc import Sequence

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Schedule, format_grid
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.simulate import simulate
from lightning_smp.schedule.work import FORWARD, KINDS, Work, build_work, split_by

__all__ = ["validate"]

_SHOWN = 8
_SAME = 1e-9  # relative; sums of equal amounts in another order are the same


def validate(
    graphs: Sequence[SegmentGraph],
    schedule: Schedule,
    *,
    active_microbatches: int | None = None,
    memory_limit: float | None = None,
    forward_only: bool = False,
) -> None:
    """Check that the schedule executes the whole step, once, in an order that cannot get stuck.

    The limit on active microbatches is checked on each rank: a microbatch is active there from its
    first to its last action, and none may begin while the limit is reached. This follows from the
    order alone, so it holds whatever the real times.

    Args:
        graphs: One graph per microbatch.
        schedule: The schedule to check.
        active_microbatches: The limit; None leaves it unchecked.
        memory_limit: Most memory that the segments alive on a rank may keep, in the unit of
            :attr:`Segment.memory`; None leaves it unchecked.
        forward_only: Whether the step has no backwards.

    Raises:
        ScheduleError: If an action is missing, doubled, unknown or on the wrong rank, comes before
            what it needs, the ranks deadlock, or a limit is exceeded. The message shows the
            schedule and points at the step.
    """
    work = build_work(graphs, forward_only=forward_only, split=split_by(schedule))
    orders = work.encode(schedule)
    _check_complete(work, schedule, orders)
    _check_order(work, schedule, orders)
    simulate(graphs, schedule)
    if active_microbatches is not None:
        for rank, order in enumerate(orders):
            _check_active(work, schedule, rank, order, active_microbatches)
    if memory_limit is not None:
        for rank, order in enumerate(orders):
            _check_memory(work, schedule, rank, order, memory_limit)


def _check_complete(work: Work, schedule: Schedule, orders: Sequence[Sequence[int]]) -> None:
    listed = {name for order in orders for name in order}
    missing = [name for name in work.todo if name not in listed]
    if not missing:
        return
    shown = ", ".join(f"{work.actions[n]} of rank {work.ranks[n]}" for n in missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    ends = {work.ranks[name]: len(orders[work.ranks[name]]) for name in missing}
    raise ScheduleError(
        f"The schedule {schedule.name!r} leaves out {shown}{more}; every action of the step must "
        f"be listed once.\n{format_grid(schedule, marks=ends)}"
    )


def _check_order(work: Work, schedule: Schedule, orders: Sequence[Sequence[int]]) -> None:
    for rank, order in enumerate(orders):
        steps = {name: step for step, name in enumerate(order)}
        for step, name in enumerate(order):
            for need, _ in work.needs[name]:
                if steps.get(need, -1) > step:
                    raise ScheduleError(
                        f"In the schedule {schedule.name!r}, step {step} of rank {rank}, "
                        f"{work.actions[name]}, comes before {work.actions[need]} (step "
                        f"{steps[need]}), which it needs; exchange them.\n"
                        + format_grid(schedule, marks={rank: step})
                    )


def _check_active(
    work: Work, schedule: Schedule, rank: int, order: Sequence[int], limit: int
) -> None:
    left = Counter(work.actions[name].microbatch for name in order)
    active: set[int] = set()
    for step, name in enumerate(order):
        microbatch = work.actions[name].microbatch
        if microbatch not in active and len(active) >= limit:
            raise ScheduleError(
                f"In the schedule {schedule.name!r}, step {step} of rank {rank}, "
                f"{work.actions[name]}, begins microbatch {microbatch} while {len(active)} are "
                f"active (limit {limit}); finish one first or raise active_microbatches.\n"
                + format_grid(schedule, marks={rank: step})
            )
        left[microbatch] -= 1
        (active.add if left[microbatch] else active.discard)(microbatch)


def _check_memory(
    work: Work, schedule: Schedule, rank: int, order: Sequence[int], limit: float
) -> None:
    ends = {name // KINDS for name in order if work.is_last_use(name)}
    memory = 0.0
    for step, name in enumerate(order):
        if name % KINDS == FORWARD and name // KINDS in ends:
            memory += work.memory[name]
        if memory > limit * (1.0 + _SAME):
            raise ScheduleError(
                f"In the schedule {schedule.name!r}, step {step} of rank {rank}, "
                f"{work.actions[name]}, brings the activations alive to {memory:g} (limit "
                f"{limit:g}); finish a microbatch first or raise the limit.\n"
                + format_grid(schedule, marks={rank: step})
            )
        memory -= work.memory[name] * work.is_last_use(name)
