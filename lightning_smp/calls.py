"""Where a rank is in the run's collectives, and which ranks therefore wait for each other for ever.

All ranks of a group must come to the group's calls in one order. So a call is known by its number
among those that two ranks have in common: if their calls of one number differ, neither ever ends,
however long the ranks would wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from lightning_smp.errors import CommunicationError, SMPError
from lightning_smp.topology import AXES, Axis, Topology
from lightning_smp.trail import Trail

__all__ = ["Call", "Calls", "Sheet", "Torn", "endless_wait", "is_loss"]

_PLACES: Final = {axis: place for place, axis in enumerate(AXES)}
_NO_CALLS: Final = (0,) * len(AXES)
# Messages of gloo, NCCL and the store: who has such an error has usually lost another rank.
_CONNECTION: Final = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe|socket timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that waits for other ranks.

    Attributes:
        text: what was called, equal on all ranks that must call it.
        nth: how often this rank has called it, this time included.
        axis: the group that must call it; None for a message to or from one rank.
        counts: how many calls this rank has begun on each axis, this one included.
        peer: the other rank of a message.
        sends: whether the message goes to it.
    """

    text: str
    nth: int
    axis: Axis | None
    counts: tuple[int, ...]
    peer: int = -1
    sends: bool = False

    def __str__(self) -> str:
        return self.text if self.nth == 1 else f"{self.text} (call {self.nth})"


@dataclass(frozen=True, slots=True)
class Sheet:
    """One rank's calls at one time.

    Attributes:
        serial: how many sheets came before.
        open: the calls that it is in, from the outermost.
        failed: the calls that an exception has just left, from the innermost.
        counts: how many calls it has begun on each axis.
        last: the outermost call that it made last.
        place: where in the user's code it is, in words; may be empty.
    """

    serial: int = 0
    open: tuple[Call, ...] = ()
    failed: tuple[Call, ...] = ()
    counts: tuple[int, ...] = _NO_CALLS
    last: Call | None = None
    place: str = ""

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        if self.open:
            return " in ".join(str(call) for call in reversed(self.open)) + at
        after = "" if self.last is None else f", after {self.last}"
        return f"no call of the library{at}{after}"

    def to_plain(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Sheet:
        """The sheet that gave the plain data."""

        def call(given: Mapping[str, Any]) -> Call:
            return Call(**{**given, "counts": tuple(given["counts"])})

        last = plain["last"]
        return cls(
            plain["serial"], tuple(map(call, plain["open"])), tuple(map(call, plain["failed"])),
            tuple(plain["counts"]), None if last is None else call(last), plain["place"],
        )  # fmt: skip


class Torn(NamedTuple):
    """A call that an error has left: what the ranks sent each other in it may be under way.

    Attributes:
        call: the outermost call.
        error: in words.
        in_step: whether it came from the inside of a step.
    """

    call: Call
    error: str
    in_step: bool

    @classmethod
    def by(cls, error: BaseException, call: Call, *, in_step: bool = False) -> Torn:
        """The error leaves the call."""
        return cls(call, f"{type(error).__name__}: {error}", in_step)

    def __str__(self) -> str:
        return f"left {self.call} by {self.error}"


class Calls:
    """The calls of this rank; its `sheet` may be read by another thread at any time.

    Attributes:
        sheet: where this rank is, but for what split modules exchange; `where` has that too.
        trail: what split modules exchange.
        explain: says why a call that lost its connection could not end, if that is known.
        torn: the first call since the start that an error has left, a step before others.
        mend: called before a call that comes after a torn step; brings the ranks together again,
            and calls `mended`, or raises. None: nobody does.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Counts from 0; all ranks must do so at the same point."""
        self.sheet = Sheet()
        self.trail = Trail()
        self._marks = _NO_CALLS
        self._seen: tuple[tuple[int, int, bool], Sheet] = ((0, 0, False), self.sheet)
        self.explain: Callable[[Call], str | None] = _unexplained
        self.torn: Torn | None = None
        self.mend: Callable[[Torn], None] | None = None
        self._made: dict[str, int] = {}

    def collective(self, text: str, axis: Axis) -> _Opened:
        """A context whose body is a call that all ranks of a group must make.

        A connection that is lost in it, because another rank has ended its script or never comes to
        it, is a `CommunicationError` that says so.

        Args:
            text: what it is, equal on all of them.
            axis: the group.
        """
        if self.torn is not None:
            self._mend(self.torn)
        self._marks = _plus(self._marks, _PLACES[axis], 1)
        return _Opened(self, Call(text, self._number(text), axis, self._counts()))

    def message(self, text: str, peer: int, *, sends: bool) -> _Opened:
        """The same for a body that sends something to another rank, or receives from it."""
        if self.torn is not None:
            self._mend(self.torn)
        return _Opened(self, Call(text, self._number(text), None, self._counts(), peer, sends))

    def tear(self, error: BaseException) -> None:
        """An error leaves the inside of the step that this rank is in."""
        if self.sheet.open and (self.torn is None or not self.torn.in_step):
            self.torn = Torn.by(error, self.sheet.open[0], in_step=True)

    def mended(self) -> None:
        """All ranks are at the same point again, whichever calls each had begun."""
        self.sheet = Sheet(self.sheet.serial + 1)
        self.trail.forget()
        self._marks = _NO_CALLS
        self.torn = None

    def where(self) -> Sheet:
        """The sheet, with the exchange of a split module that this rank is in.

        It is the same object while nothing moves; another thread may ask at any time.
        """
        sheet, now = self.sheet, self.trail.now
        key = (sheet.serial, self.trail.count, now is None)
        if key == self._seen[0] or not self.trail.count:
            return self._seen[1] if self.trail.count else sheet
        counts = self._counts()
        inner: tuple[Call, ...] = ()
        if now is not None:
            inner = (Call(self.trail.describe(now), self.trail.count, "tp", counts),)
        serial = sheet.serial + self.trail.count
        found = replace(sheet, serial=serial, open=(*sheet.open, *inner), counts=counts)
        self._seen = (key, found)
        return found

    def _mend(self, torn: Torn) -> None:
        if torn.in_step and self.mend is not None and not self.sheet.open:
            self.mend(torn)

    def _counts(self) -> tuple[int, ...]:
        """Calls on each axis; exchanges of split modules count on theirs."""
        count = self.trail.count
        return _plus(self._marks, _PLACES["tp"], count) if count else self._marks

    def _number(self, text: str) -> int:
        number = self._made[text] = self._made.get(text, 0) + 1
        return number


class _Opened:
    """The context of a call. Plain Python and few objects: every step opens some."""

    __slots__ = ("_call", "_calls", "_outer")

    def __init__(self, calls: Calls, call: Call) -> None:
        self._calls, self._call = calls, call

    def __enter__(self) -> None:
        call = self._call
        self._outer = outer = self._calls.sheet
        last = outer.last if outer.open else call
        self._calls.sheet = Sheet(outer.serial + 1, (*outer.open, call), (), call.counts, last)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        calls, opened = self._calls, self._outer.open
        now = calls.sheet
        failed = () if error is None else (*now.failed, self._call)
        calls.sheet = Sheet(now.serial + 1, opened, failed, now.counts, now.last)
        if error is not None and not opened and calls.torn is None:
            calls.torn = Torn.by(error, self._call)
        if error is not None and is_loss(error):
            reason = calls.explain(self._call)
            if reason is not None:
                raise CommunicationError(reason) from error


def _plus(counts: tuple[int, ...], place: int, more: int) -> tuple[int, ...]:
    return (*counts[:place], counts[place] + more, *counts[place + 1 :])


def is_loss(error: BaseException) -> bool:
    """Whether an error may be the mere consequence of another rank's end."""
    if isinstance(error, SMPError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_CONNECTION.search(str(error)))


def endless_wait(
    sheets: Mapping[int, Sheet], ended: Mapping[int, Sheet], topology: Topology, start: int
) -> list[int] | None:
    """Finds a chain of waits from which no rank can come.

    Args:
        sheets: where ranks are; those that are on their way may be missing.
        ended: where ranks were when they ended.
        topology: the grid of all ranks.
        start: the rank to begin with.

    Returns:
        Ranks, from ``start``, each of which waits for the next one; the last has ended or is in the
        chain. None if there is no such chain: whoever is waited for may still come.
    """
    chain = [start]
    untried = [_awaited(sheets, ended, topology, start)]
    seen = {start}
    while untried:
        rank = next(untried[-1], None)
        if rank is None:
            untried.pop()
            chain.pop()
        elif rank in ended or rank in chain:
            return [*chain, rank]
        elif rank not in seen and rank in sheets:
            seen.add(rank)
            chain.append(rank)
            untried.append(_awaited(sheets, ended, topology, rank))
    return None


def _awaited(
    sheets: Mapping[int, Sheet], ended: Mapping[int, Sheet], topology: Topology, rank: int
) -> Iterator[int]:
    for call in sheets[rank].open:
        members = (call.peer,) if call.axis is None else topology.group(call.axis, rank)
        for other in members:
            sheet = ended.get(other) or sheets.get(other)
            if other != rank and sheet is not None:
                common = [other in topology.group(axis, rank) for axis in AXES]
                if _waits(rank, call, sheet, common, has_ended=other in ended):
                    yield other


def _waits(rank: int, call: Call, other: Sheet, common: list[bool], *, has_ended: bool) -> bool:
    """Whether a rank in ``call`` waits for a rank with the sheet ``other``.

    Args:
        rank: the one that waits.
        call: what it is in.
        other: where the other one is.
        common: for each axis, whether both are in one group.
        has_ended: whether that is where the other one was at its end.
    """

    def number(counts: tuple[int, ...]) -> int:
        return sum(count for count, is_common in zip(counts, common, strict=True) if is_common)

    if call.axis is None:
        inner = other.open[-1] if other.open else None
        return inner is None or inner.peer != rank or inner.sends == call.sends
    if number(other.counts) < number(call.counts):
        return True
    for its in (*other.open, *(other.failed if has_ended else ())):
        is_common = its.axis is not None and common[AXES.index(its.axis)]
        if is_common and number(its.counts) == number(call.counts):
            return has_ended or its.text != call.text
    return False


def _unexplained(call: Call) -> None:
    del call
