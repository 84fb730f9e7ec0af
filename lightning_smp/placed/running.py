"""Calls that this rank runs, where all that they give is one new tensor.

What such a call does was decided when the program was recorded. So it takes this rank's tensors,
runs, compares the result with what the others take it to be, and sends it where it is awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.placed.outcome import mismatch
from lightning_smp.placed.places import has_nested_tensors
from lightning_smp.placed.ready import ReadyCall, take_back
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import Entry

if TYPE_CHECKING:
    from lightning_smp.placed.places import Places
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["OwnCall"]


class OwnCall(ReadyCall):
    """One call of a program that this rank runs; arguments as of `ReadyCall`.

    Attributes:
        draw: which of the run's seeds a unit draws by; -1 for a function.
    """

    __slots__ = ("_arrivals", "_num_positional", "_placed", "draw")

    is_here = True

    def __init__(self, entry: Entry, position: int, target: Any, places: Places) -> None:
        super().__init__(entry, position, target, places)
        self._arrivals = [(self.tensors[edge.operand], edge) for edge in entry.arrivals]
        self._placed = [i for i in self.tensors if self._keys[i][0] == "v"]
        self._num_positional = self._count - len(self._names)
        self.draw = -1

    @staticmethod
    def suits(entry: Entry, rank: int) -> bool:
        """Whether a rank runs a call that gives one new tensor and does nothing else."""
        return entry.home == rank and entry.makes_one and not has_nested_tensors(entry.key)

    def _finish(self, run: MicrobatchRun, args: tuple[Any, ...]) -> Any:
        entry, target = self.entry, self.target
        run.begin_segments(entry)
        if run.lent:
            take_back(run)
        for index, edge in self._arrivals:
            tensor = args[index]
            run.take_in(tensor, tensor._value, edge)
        given: Any = [*args]
        for index in self._placed:
            given[index] = args[index]._value.local
        named = {}
        if self._names:
            named = dict(zip(self._names, given[self._num_positional :], strict=True))
            given = given[: self._num_positional]
        seed = None if self.draw < 0 else run.seeds[self.draw]
        result = run.execute(target, given, named, seed)
        return self._wrap(run, result, seed)

    def _wrap(self, run: MicrobatchRun, result: Any, seed: int | None) -> PlacedTensor:
        """The placed tensor of the result, which is sent to those who wait for it."""
        problem = "returned no tensor"
        if isinstance(result, torch.Tensor):
            problem = mismatch(result, self.specs[0])
        if problem:
            raise run.unlike_recorded(self.target, problem)
        tensor = self._stand_in(run, 0)
        value = tensor._value
        value.local = result
        run.lent.append(tensor)
        for edge in self.entry.departures:
            run.send(value, edge)
        if run.region is not None:
            run.region.append((self.entry, seed, None))
        return tensor
