"""What a call gives: wrapped results, changed operands, and what others wait for."""

from __future__ import annotations

from typing import Any

import torch

from lightning_smp.errors import CommunicationError, UnsupportedError
from lightning_smp.placed.executing import Executing
from lightning_smp.placed.functions import READS
from lightning_smp.placed.operands import Operands
from lightning_smp.placed.outcome import matches
from lightning_smp.placed.structure import build
from lightning_smp.placed.tensor import SPOILT, USED, PlacedTensor, Value
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Entry, TensorSpec

__all__ = ["Results"]

_CPU = torch.device("cpu")


class Results(Executing):
    """Wraps what calls return."""

    def _wrap_real(
        self, entry: Entry, target: Any, result: Any, operands: Operands, position: int,
        seed: int | None,
    ) -> Any:  # fmt: skip
        if entry.home == EVERYWHERE and target in READS:
            return result
        outcome = entry.outcome
        if entry.home == EVERYWHERE and not any(leaf.spec.requires_grad for leaf in outcome.leaves):
            return result
        real: list[torch.Tensor] = []
        problem = matches(self, target, result, outcome, real)
        if problem:
            raise self.unlike_recorded(target, problem)
        return self._finish(entry, target, operands, position, real, seed)

    def unlike_recorded(self, target: Any, problem: str) -> CommunicationError:
        """The error for a call that gave something else than when it was recorded."""
        return CommunicationError(
            f"stage {self.rank}, microbatch {self.index}: {self._label(target)} {problem}, "
            "while the other stages expect what it gave when the step was recorded. A result "
            "whose shape depends on data must be made in the code between submodules, or "
            "inside one submodule that reduces it to a fixed shape."
        )

    def _wrap_specs(
        self, entry: Entry, target: Any, args: Any, kwargs: Any, operands: Operands, position: int
    ) -> Any:
        if entry.outcome.random and type(target) is not UnitEntry:
            self._draw_alike(target, args, kwargs)
        return self._finish(entry, target, operands, position, None, None)

    def _finish(
        self,
        entry: Entry,
        target: Any,
        operands: Operands,
        position: int,
        real: list[torch.Tensor] | None,
        seed: int | None,
    ) -> Any:
        """Wraps the result, notes what was changed in place and sends what others wait for."""
        outcome = entry.outcome
        made: dict[int, Value] = {}
        for ordinal, requires_grad in outcome.mutated:
            value = self._note_mutation(
                operands, ordinal, requires_grad, entry.home, position, target
            )
            made[value.index] = value
        leaves: list[Any] = []
        for ordinal, leaf in enumerate(outcome.leaves):
            if leaf.same >= 0:
                leaves.append(operands.tensors[leaf.same])
                continue
            value = self._new_value(entry.home, position)
            if leaf.view >= 0:
                value.join(operands.values[leaf.view])
            elif leaf.view < -1:  # a view of another part of this result
                value.join(leaves[-2 - leaf.view]._value)
            if real is not None:
                value.local = real[ordinal]
            made[value.index] = value
            tensor = self.placeholder(leaf.spec, value)
            if real is None and self.following:
                self.lane[value.index] = tensor
            leaves.append(tensor)
        if real is not None and entry.departures and self.following:
            for edge in entry.departures:
                if edge.source[0] == self.rank and edge.consumed != position:
                    self.send(_find(edge.value, made), edge)
        if type(target) is UnitEntry and outcome.escapes:
            target.plant(outcome.escapes, leaves, operands.objects)
        result = build(outcome.template, leaves, operands.objects)
        if self.region is not None:
            self.region.append((entry, seed, None if real is not None else result))
        return result

    def _new_value(self, home: int, position: int) -> Value:
        value = Value(self.mark, self.num_values, home, self._home_node(home))
        self.num_values += 1
        value.produced = position
        if home == EVERYWHERE:
            self._note_segments(value, home)
        return value

    def placeholder(self, spec: TensorSpec, value: Value) -> PlacedTensor:
        """A new tensor that stands for a value in the step's own code."""
        device = self.context.device if spec.on_run_device else _CPU
        return PlacedTensor(spec, device, value)

    def _note_segments(self, value: Value, home: int) -> None:
        if home == EVERYWHERE:
            value.segments = dict(enumerate(self.tracker.current))
        else:
            value.segments = {home: self.tracker.current[home]}

    def _note_mutation(
        self,
        operands: Operands,
        ordinal: int,
        requires_grad: bool,
        home: int,
        position: int,
        target: Any,
    ) -> Value:
        """An operand was changed in place on the call's home: its copies elsewhere are stale."""
        value, tensor = operands.values[ordinal], operands.tensors[ordinal]
        if value is None:
            value = self._adopt_plain(tensor, target, home)
        elif value.home != home:
            if value.group.size > 1 or value.stages:
                raise UnsupportedError(
                    f"{self._label(target)} on stage {home} changes in place a tensor of stage "
                    f"{value.home} that has views there or is a parameter. "
                    "Give it a copy: x.clone()."
                )
            value.home = home
        elif (
            value.group.size > 1
            and not value.stages
            and value.node != self._home_node(home)
            and requires_grad
        ):
            raise UnsupportedError(
                f"{self._label(target)} changes in place a tensor with views after its stage "
                "has sent and received in between; its gradient would be cut. Use the "
                "out-of-place form."
            )
        value.wear |= USED
        value.group.version += 1
        value.group.changed = position
        value.node = self._home_node(home)
        value.produced = position
        self._note_segments(value, home)
        mine = operands.local_of(ordinal)
        if mine is not None and mine is not tensor and home in (self.rank, EVERYWHERE):
            value.local = mine
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(tensor, PlacedTensor) and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
                value.wear = SPOILT
        return value


def _find(index: int, made: dict[int, Value]) -> Value:
    """A value that a call has made or changed, or one that shares storage with such."""
    found = made.get(index)
    if found is None:
        groups = (value.group.members for value in made.values())
        found = next(members[index]() for members in groups if members and index in members)
        assert found is not None
    return found
