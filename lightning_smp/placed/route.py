"""The route of one rank through a program: its ready-made calls, and the lanes of microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lightning_smp.placed.passing import PassedCall
from lightning_smp.placed.places import Places
from lightning_smp.placed.ready import NOTHING, ReadyCall
from lightning_smp.placed.running import OwnCall
from lightning_smp.program import Program

if TYPE_CHECKING:
    from lightning_smp.placed.units import UnitEntry

__all__ = ["Route"]


class Route:
    """The ready-made calls of a program on one rank, and the lanes of its microbatches.

    Args:
        program: the program.
        rank: the rank.
        units: the units by ordinal.
    """

    def __init__(self, program: Program, rank: int, units: Mapping[int, UnitEntry]) -> None:
        places = Places(program.num_values)
        self._calls: list[ReadyCall] = []
        for position, entry in enumerate(program.entries):
            call: ReadyCall = NOTHING
            for kind in (PassedCall, OwnCall):
                if kind.suits(entry, rank):
                    token = entry.key[0]
                    target = units[token[1]] if isinstance(token, tuple) else token
                    call = kind(entry, position, target, places)
            self._calls.append(call)
        self._calls.append(NOTHING)
        for call, following in pairwise(self._calls):
            if call is not NOTHING:
                call.following = following
        self._fresh, self._filled = places.lane(), places.filled()
        self._lanes: list[list[Any]] = []

    def at(self, position: int) -> ReadyCall:
        """The call at this position of the program; `NOTHING` if it must go the long way."""
        return self._calls[position]

    def enter(self) -> list[Any]:
        """A lane for a microbatch that begins."""
        return self._lanes.pop() if self._lanes else list(self._fresh)

    def leave(self, lane: list[Any]) -> None:
        """The microbatch has come to its end."""
        self.forget(lane)
        self._lanes.append(lane)

    def forget(self, lane: list[Any]) -> None:
        """What came from elsewhere must be looked at again."""
        lane[self._filled] = self._fresh[self._filled]
