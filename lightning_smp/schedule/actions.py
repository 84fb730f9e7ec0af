"""Actions and schedules: what each rank executes, in order, as plain data with a text form.

One action is the forward or the backward of one segment of one microbatch. Nothing here knows
about time, dependencies or communication.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from lightning_smp.errors import ScheduleError

__all__ = ["Action", "ActionKind", "Schedule", "format_grid"]

ActionKind = Literal["F", "B"]

_ACTION = re.compile(r"([FB])(\d+)\.(\d+)", re.ASCII)
_ROW = re.compile(r"rank (\d+):(.*)", re.ASCII)
_HEADER = "schedule "
_GRID_STEPS = 12


class Action(NamedTuple):
    """The forward (``F``) or backward (``B``) of one segment of one microbatch.

    >>> str(Action("F", microbatch=3, segment=1))
    'F3.1'
    """

    kind: ActionKind
    microbatch: int
    segment: int

    def __str__(self) -> str:
        """Return the short form, ``<kind><microbatch>.<segment>``."""
        return f"{self.kind}{self.microbatch}.{self.segment}"

    @classmethod
    def from_text(cls, text: str) -> "Action":
        """Read the short form back.

        Raises:
            ScheduleError: If the text is not an action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; write F or B, the microbatch, a dot and the segment, "
                "as in F3.1."
            )
        return cls(cast("ActionKind", match[1]), int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered actions of every pipeline rank.

    Attributes:
        ranks: For each rank, the actions in the order of execution.
        name: How the order was made, for people; one line.
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "unnamed"

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, with and without actions."""
        return len(self.ranks)

    def to_text(self) -> str:
        """Write the schedule, a header and one row per rank.

        >>> print(Schedule(((Action("F", 0, 0),), ()), name="tiny").to_text())
        schedule tiny
        rank 0: F0.0
        rank 1:
        """
        rows = [
            f"rank {rank}: {' '.join(map(str, actions))}".rstrip()
            for rank, actions in enumerate(self.ranks)
        ]
        return "\n".join([f"{_HEADER}{' '.join(self.name.split())}".rstrip(), *rows])

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read what :meth:`to_text` wrote.

        Raises:
            ScheduleError: If the header, a row or an action cannot be read, or the rows are not
                numbered 0, 1, 2, and so on.
        """
        header, *rows = text.strip().splitlines() or [""]
        if not f"{header} ".startswith(_HEADER):
            raise ScheduleError(f"A schedule begins with 'schedule <name>', not with {header!r}.")
        ranks = tuple(_parse_row(row, rank) for rank, row in enumerate(rows))
        return cls(ranks, name=header[len(_HEADER) :].strip())


def _parse_row(row: str, rank: int) -> tuple[Action, ...]:
    match = _ROW.fullmatch(row.strip())
    if match is None or int(match[1]) != rank:
        raise ScheduleError(
            f"Row {rank} of the schedule is {row!r}; it must read 'rank {rank}: F0.0 ...' "
            "(one row per rank, in order)."
        )
    return tuple(Action.from_text(word) for word in match[2].split())


def format_grid(schedule: Schedule, *, marks: dict[int, int]) -> str:
    """Show the schedule around the marked steps, a caret under each.

    Args:
        schedule: What to show.
        marks: For some ranks, the step (index into the rank's actions) to point at; a step just
            beyond the last action points at the end of the row.

    Returns:
        One line per rank, plus one with a caret below each marked row.
    """
    first = max(0, min(marks.values(), default=0) - _GRID_STEPS // 2)
    last = max(marks.values(), default=0) + _GRID_STEPS // 2
    shown = [[str(action) for action in row[first : last + 1]] for row in schedule.ranks]
    width = max((len(cell) for row in shown for cell in row), default=4) + 1
    lines = []
    for rank, cells in enumerate(shown):
        more = " ..." if len(schedule.ranks[rank]) > last + 1 else ""
        lead = f"  rank {rank:<3}| " + ("... " if first else "")
        lines.append((lead + "".join(cell.ljust(width) for cell in cells) + more).rstrip())
        if rank in marks:
            lines.append(" " * (len(lead) + (marks[rank] - first) * width) + "^^^^")
    return "\n".join(lines)
