"""The route of one rank through a program: its ready-made calls, and the lanes of microbatches."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.placed.passing import PassedCall
from lightning_smp.placed.places import Places
from lightning_smp.placed.random import unit_seed
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
        self._draws: list[tuple[int, int]] = []  # unit and ordinal of each of its calls here
        for position, entry in enumerate(program.entries):
            call: ReadyCall = NOTHING
            for kind in (PassedCall, OwnCall):
                if kind.suits(entry, rank):
                    token = entry.key[0]
                    target = units[token[1]] if isinstance(token, tuple) else token
                    call = kind(entry, position, target, places)
                    if isinstance(call, OwnCall) and isinstance(token, tuple):
                        call.draw = len(self._draws)
                        self._draws.append((token[1], entry.unit_call))
            self._calls.append(call)
        self._calls.append(NOTHING)
        for call, following in pairwise(self._calls):
            if call is not NOTHING:
                call.following = following
        self._fresh, self._filled = places.lane(), places.filled()
        self._lanes: list[list[Any]] = []
        self._inputs: list[tuple[int, int]] | None = None

    def at(self, position: int) -> ReadyCall:
        """The call at this position of the program; `NOTHING` if it must go the long way."""
        return self._calls[position]

    def enter(self, inputs: Sequence[torch.Tensor], held: Container[int]) -> list[Any]:
        """A lane for a microbatch that begins.

        Args:
            inputs: plain tensors that the microbatch is given, of the same types and shapes for
                all that follow the program.
            held: ids of tensors that are not on all stages.
        """
        lane = self._lanes.pop() if self._lanes else list(self._fresh)
        if self._inputs and inputs:
            for place, ordinal in self._inputs:
                tensor = inputs[ordinal]
                if type(tensor) is torch.Tensor and id(tensor) not in held:
                    lane[place] = tensor
        return lane

    def seeds(self, state: int) -> list[int]:
        """The seeds of the units' calls of a microbatch, by `OwnCall.draw`.

        All at once: between the units' own work each takes several times as long.
        """
        return [unit_seed(state, unit, ordinal) for unit, ordinal in self._draws]

    def finish(self, lane: list[Any], inputs: Sequence[torch.Tensor]) -> None:
        """The step's code of a microbatch has come to its end."""
        if self._inputs is None:
            self._inputs = self._find(lane, inputs)
        self.forget(lane)

    def leave(self, lane: list[Any]) -> None:
        """The microbatch's step is over: another one may have the lane."""
        self._lanes.append(lane)

    def forget(self, lane: list[Any]) -> None:
        """What came from elsewhere must be looked at again."""
        lane[self._filled] = self._fresh[self._filled]

    def _find(self, lane: list[Any], inputs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Where calls have been given inputs as they are: (place, ordinal of the input)."""
        ordinals = {id(tensor): ordinal for ordinal, tensor in enumerate(inputs)}
        places = range(*self._filled.indices(len(lane)))
        return [(p, ordinals[id(lane[p])]) for p in places if id(lane[p]) in ordinals]
