"""What the split modules of this rank exchange with its tensor group, noted at next to no cost."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import TypeAlias

__all__ = ["Exchange", "Operation", "Trail", "digest_of", "first_difference"]

Exchange: TypeAlias = tuple[int, ...]
"""The module's ordinal (-1 outside of all), the operation, and numbers that all ranks share."""


class Operation(IntEnum):
    """What may be exchanged."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    ALL_TO_ALL = 3


class Trail:
    """The exchanges of a rank since the last comparison with its group.

    Attributes:
        at: ordinal of the split module that runs, or ran last; -1 for none.
        count: how many exchanges there were in this run.
        now: the one that this rank is in.
        names: dotted names of the split modules, by ordinal.
    """

    __slots__ = ("_done", "at", "count", "names", "now")

    def __init__(self) -> None:
        self.at = -1
        self.count = 0
        self.now: Exchange | None = None
        self.names: Sequence[str] = ()
        self._done: list[Exchange] = []

    def begin(self, operation: Operation, *numbers: int) -> None:
        """An operation begins; the numbers are equal on all ranks."""
        self.count += 1
        self.now = (self.at, operation, *numbers)
        self._done.append(self.now)

    def end(self) -> None:
        """The operation is over."""
        self.now = None

    def forget(self) -> None:
        """Begins anew, on all ranks of the group."""
        self.count, self.now, self._done = 0, None, []

    def taken(self) -> list[Exchange]:
        """The exchanges since the last call."""
        done, self._done = self._done, []
        return done

    def describe(self, exchange: Exchange) -> str:
        """Names an exchange."""
        ordinal, operation = exchange[0], Operation(exchange[1]).name.lower().replace("_", "-")
        if not 0 <= ordinal < len(self.names):
            return f"{operation} of a split module"
        return f"{operation} of {self.names[ordinal] or 'the model'!r}"


def digest_of(exchanges: Sequence[Exchange]) -> str:
    """A hash of exchanges, equal on ranks that did the same."""
    return f"{hash(tuple(exchanges)) & (1 << 64) - 1:016x}"  # of integers: the same everywhere


def first_difference(everyone: Sequence[Sequence[str]]) -> list[str]:
    """What each rank did where they first did different things.

    Args:
        everyone: the exchanges of each rank, described.
    """
    for column in zip_longest(*everyone, fillvalue="nothing more"):
        if len(set(column)) > 1:
            return list(column)
    return ["the same, on tensors of other shapes"] * len(everyone)
