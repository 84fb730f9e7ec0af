"""Actions and schedules: what each rank executes, in order, as plain data with a text form.

One action is the forward of one segment of one microbatch, its backward, or one of the two parts
that a backward may be split into. Nothing here knows about time, dependencies or communication.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, cast

from lightning_smp.errors import ScheduleError

__all__ = ["Action", "ActionKind", "Schedule", "format_grid"]

ActionKind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"([FBIW])(\d+)\.(\d+)", re.ASCII)
_ROW = re.compile(r"\s*rank\s+(\d+)\s*:(.*)", re.ASCII)
_WORD = re.compile(r"\S+")
_HEADER = "schedule "
_COMMENT = "#"
_IDLE = frozenset({".", "|"})
_GRID_STEPS = 12


class Action(NamedTuple):
    """One kind of work on one segment of one microbatch.

    ``F`` is the forward and ``B`` the whole backward. A backward may be split into ``I``, which
    makes the gradients of what entered the segment, and ``W``, which makes those of its parameters.

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
                f"{text!r} is not an action; write F, B, I or W, the microbatch, a dot and the "
                "segment, as in F3.1."
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

    def of_microbatches(self, numbers: Sequence[int]) -> "Schedule":
        """The same order for other microbatches: number ``m`` becomes ``numbers[m]``."""
        if list(numbers) == list(range(len(numbers))):
            return self
        rows = (
            tuple(action._replace(microbatch=numbers[action.microbatch]) for action in row)
            for row in self.ranks
        )
        return Schedule(tuple(rows), self.name)

    def to_text(self) -> str:
        """Write the schedule as a table: a header, then one row per rank and one column per step.

        >>> print(Schedule(((Action("F", 0, 0),), ()), name="tiny").to_text())
        schedule tiny
        rank 0: F0.0
        rank 1:
        """
        columns = list(zip_longest(*self.ranks))
        widths = [max(len(str(action)) for action in column if action) for column in columns]
        rows = [
            f"rank {rank}: {' '.join(str(a).ljust(w) for a, w in zip(row, widths, strict=False))}"
            for rank, row in enumerate(self.ranks)
        ]
        header = f"{_HEADER}{' '.join(self.name.split())}"
        return "\n".join(line.rstrip() for line in [header, *rows])

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read what :meth:`to_text` wrote, or a person.

        Empty lines and lines that begin with ``#`` mean nothing, nor do single dots and bars
        between the actions: they may stand for idle time and for columns.

        Raises:
            ScheduleError: If the header, a row or an action cannot be read, or the rows are not
                numbered 0, 1, 2, and so on. The message shows the line and points at the place.
        """
        lines = [
            (number, line.rstrip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith(_COMMENT)
        ]
        number, header = lines[0] if lines else (1, "")
        if not f"{header} ".startswith(_HEADER):
            raise ScheduleError(
                f"Line {number}: a schedule begins with 'schedule <name>', not with {header!r}."
            )
        ranks = tuple(_parse_row(*line, rank) for rank, line in enumerate(lines[1:]))
        return cls(ranks, name=header[len(_HEADER) :].strip())


def _parse_row(number: int, row: str, rank: int) -> tuple[Action, ...]:
    match = _ROW.fullmatch(row)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(
            f"Line {number}: Row {rank} of the schedule is {row!r}; it must read "
            f"'rank {rank}: F0.0 ...' (one row per rank, in order)."
        )
    actions = []
    for word in _WORD.finditer(row, match.start(2)):
        if word[0] in _IDLE:
            continue
        try:
            actions.append(Action.from_text(word[0]))
        except ScheduleError as error:
            pointer = " " * word.start() + "^" * len(word[0])
            raise ScheduleError(f"Line {number}: {error}\n{row}\n{pointer}") from None
    return tuple(actions)


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
