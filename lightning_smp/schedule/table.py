"""Schedules in files: a table that people can edit and share, checked before it is used."""

from collections.abc import Sequence
from pathlib import Path

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule.actions import Schedule
from lightning_smp.schedule.draw import draw
from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.simulate import simulate
from lightning_smp.schedule.validate import validate

__all__ = ["fit_schedule", "read_schedule", "write_schedule"]

_LEGEND = """\
# One row per rank, executed from left to right. F is a forward, B a backward, I and W its two parts
# (gradients of inputs, then of parameters); the numbers are microbatch.segment. Dots, bars, spaces
# and lines like this one mean nothing.
"""


def write_schedule(
    path: str | Path, schedule: Schedule, graphs: Sequence[SegmentGraph] | None = None
) -> None:
    """Write a schedule to a file, below its picture if the graphs are given.

    Args:
        path: The file, which is overwritten.
        schedule: A schedule of the whole step.
        graphs: One graph per microbatch, for the picture.
    """
    picture = ""
    if graphs is not None:
        lines = draw(simulate(graphs, schedule)).splitlines()
        picture = "".join(f"# {line}\n" for line in lines)
    text = f"{_LEGEND}{picture}{schedule.to_text()}\n"
    Path(path).write_text(text, encoding="ascii", errors="backslashreplace")


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a file; its name ends with the path.

    Raises:
        ScheduleError: If the file cannot be read or is no schedule; the message shows the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"The schedule file {str(path)!r} cannot be read: {error}.") from error
    try:
        schedule = Schedule.from_text(text)
    except ScheduleError as error:
        raise ScheduleError(f"In the schedule file {str(path)!r}: {error}") from None
    return Schedule(schedule.ranks, name=f"{schedule.name} ({path})".strip())


def fit_schedule(
    schedule: Schedule,
    graphs: Sequence[SegmentGraph],
    *,
    active_microbatches: int | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Cut a table to a step and check it.

    A step may have fewer microbatches than the table: what the table says of the others is left
    out, which keeps a valid order valid.

    Args:
        schedule: The whole table.
        graphs: One graph per microbatch.
        active_microbatches: As for ``validate``.
        memory_limit: As for ``validate``.

    Raises:
        ScheduleError: As ``validate``.
    """
    rows = tuple(
        tuple(action for action in row if action.microbatch < len(graphs)) for row in schedule.ranks
    )
    fitted = Schedule(rows, name=schedule.name)
    validate(graphs, fitted, active_microbatches=active_microbatches, memory_limit=memory_limit)
    return fitted
