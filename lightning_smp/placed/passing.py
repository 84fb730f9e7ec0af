"""Calls that other ranks run: what is left for this rank to do.

Where a rank owns few of the units, a step consists almost wholly of such calls, so that their cost
is the price of running the user's own step on every rank. If nothing moves to or from this rank,
the result of such a call is a placeholder, and no more is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_smp.placed.places import has_nested_tensors
from lightning_smp.placed.ready import ReadyCall
from lightning_smp.placed.structure import build
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import EVERYWHERE, Entry

if TYPE_CHECKING:
    from lightning_smp.placed.places import Places
    from lightning_smp.placed.run import MicrobatchRun

__all__ = ["PassedCall"]


class PassedCall(ReadyCall):
    """One call of a program that another rank runs; arguments as of `ReadyCall`."""

    __slots__ = ("_moves",)

    def __init__(self, entry: Entry, position: int, target: Any, places: Places) -> None:
        super().__init__(entry, position, target, places)
        self._moves = [(self.tensors[edge.operand], edge.target) for edge in entry.arrivals]

    @staticmethod
    def suits(entry: Entry, rank: int) -> bool:
        """Whether a rank has nothing to do in a call but to make placeholders."""
        outcome = entry.outcome
        if entry.home in (rank, EVERYWHERE) or rank in entry.new_segments:
            return False
        if any(edge.target[0] == rank for edge in entry.arrivals):
            return False
        if any(edge.source[0] == rank for edge in entry.departures):
            return False
        if (
            not outcome.leaves
            or outcome.mutated
            or outcome.escapes
            or _has_objects(outcome.template)
        ):
            return False
        if outcome.random and not isinstance(entry.key[0], tuple):
            return False  # not a unit: it draws from the stream of all ranks
        is_tied = any(max(leaf.same, leaf.view) >= 0 for leaf in outcome.leaves)
        return not ((is_tied or entry.arrivals) and has_nested_tensors(entry.key))

    def _finish(self, run: MicrobatchRun, args: tuple[Any, ...]) -> Any:
        run.begin_segments(self.entry)
        for index, node in self._moves:
            args[index]._value.note_copy(*node)
        if self.entry.makes_one:
            result: Any = self._stand_in(run, 0)
        else:
            result = self._build(run, args)
        if run.region is not None:
            run.region.append((self.entry, None, result))
        return result

    def _build(self, run: MicrobatchRun, args: tuple[Any, ...]) -> Any:
        """The result of a call that gives other than one new tensor."""
        leaves: list[Any] = []
        made = 0
        for leaf in self.entry.outcome.leaves:
            if leaf.same >= 0:
                leaves.append(args[self.tensors[leaf.same]])
                continue
            tensor = self._stand_in(run, made)
            made += 1
            if leaf.view != -1:
                on = args[self.tensors[leaf.view]] if leaf.view >= 0 else leaves[-2 - leaf.view]
                tensor._value.join(on._value if type(on) is PlacedTensor else None)
            leaves.append(tensor)
        return build(self.entry.outcome.template, leaves, [])


def _has_objects(template: Any) -> bool:
    if not isinstance(template, list):
        return False
    return template[:1] == ["o"] or any(map(_has_objects, template))
