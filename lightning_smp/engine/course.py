"""What a rank does in a step, as far as the programs of its microbatches say: worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_smp.engine.finality import final_parameters
from lightning_smp.engine.posting import Receive, earlier, one_order, receives_before
from lightning_smp.program import Program
from lightning_smp.schedule import Action, Schedule

if TYPE_CHECKING:
    from torch import nn

    from lightning_smp.placed.runtime import Runtime

__all__ = ["Course", "plan_course"]


@dataclass(frozen=True, slots=True)
class Course:
    """One rank's part of a step.

    Attributes:
        programs: by microbatch; kept, since courses are found by the programs' identity.
        schedule: of all ranks.
        row: this rank's actions.
        receives: those to post before each action.
        final: for positions in the row, the parameters whose gradients are final afterwards.
        attributes: (module, attribute) pairs that microbatches write.
    """

    programs: Mapping[int, Program]
    schedule: Schedule
    row: Sequence[Action]
    receives: Sequence[Sequence[Receive]]
    final: dict[int, list[nn.Parameter]]
    attributes: Sequence[tuple[str, str]]


def plan_course(
    runtime: Runtime, schedule: Schedule, programs: Mapping[int, Program], *, ahead: int
) -> Course:
    """What this rank does by a schedule of these programs.

    Args:
        runtime: this rank's.
        schedule: of all ranks.
        programs: by microbatch.
        ahead: actions by which receives are posted earlier than `receives_before` says, at least.
    """
    row = schedule.ranks[runtime.rank]
    receives = receives_before(one_order(schedule.ranks, programs), programs, runtime.rank)
    units = {unit.index: unit for unit in runtime.units}
    return Course(
        programs=programs,
        schedule=schedule,
        row=row,
        receives=earlier(receives, ahead),
        final=final_parameters(row, programs, runtime.rank, units),
        attributes=sorted({name for p in programs.values() for name in p.attributes}),
    )
