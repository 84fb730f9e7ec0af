"""Measures what each unit costs in real steps: clocks on the CPU, events on a GPU.

Note [What belongs to a unit]
Its forward is the time in its call, and in the outer code that this rank runs after it, up to the
next unit. Its backward begins where autograd reaches a result of it, and ends where autograd
reaches one of its inputs; from there to the next unit's begin it is outer code, which belongs to
the unit before, and what comes before the first begin (the loss) belongs to that unit. This is how
the analysis counts, too. The moments are noted by hooks on nodes of the graph, which stays as it
is. On a GPU nothing is synchronised: events are read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lightning_smp.placed.structure import iter_tensors
from lightning_smp.placed.units import UnitEntry
from lightning_smp.timeline.moments import Moments

__all__ = ["Measured", "UnitMeter"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank measured.

    Attributes:
        units: by index of the unit, the medians over microbatches of the seconds that its forwards
            and its backwards took in one.
        wall_s: median over the steps of the seconds of one; 0.0 if none was measured.
    """

    units: dict[int, tuple[float, float]]
    wall_s: float


@dataclass(slots=True)
class _Call:
    """One call of a unit, and the outer code after it."""

    unit: int
    microbatch: int
    segment: int
    stretches: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Backward:
    """One segment's backward: when it began, reached calls' results and inputs, and ended."""

    start: Any
    marks: list[tuple[bool, int, Any]] = field(default_factory=list)
    end: Any = None


@dataclass(slots=True)
class _Step:
    start: Any
    end: Any = None
    calls: list[_Call] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """By microbatch, its last call."""
    backwards: list[_Backward] = field(default_factory=list)


class UnitMeter:
    """Takes the times of units on one rank, over steps that follow their programs.

    Args:
        device: the run's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments = Moments(device)
        self._steps: list[_Step] = []
        self._step = _Step(None)
        self._begun: Any = None

    def begin_step(self) -> None:
        """A step begins."""
        self._step = _Step(self._moments.now())

    def end_step(self, *, counts: bool) -> None:
        """The step is over; ``counts`` if it is one to learn from."""
        self._step.end = self._moments.now()
        if counts:
            self._steps.append(self._step)

    def enter(self, run: Any, target: Any, tensors: Iterable[torch.Tensor]) -> None:
        """A call begins.

        Args:
            run: the microbatch.
            target: a unit, or a function of outer code.
            tensors: this rank's operands.
        """
        step = self._step
        if type(target) is UnitEntry:
            step.last[run.index] = call = len(step.calls)
            step.calls.append(_Call(target.index, run.index, run.tracker.current[run.rank]))
            self._watch(tensors, call, begins=False)
        self._begun = self._moments.now()

    def leave(self, run: Any, target: Any, result: Any) -> None:
        """The call that began last is over."""
        end, step = self._moments.now(), self._step
        call = step.last.get(run.index)
        if call is not None:
            step.calls[call].stretches.append((self._begun, end))
            if type(target) is UnitEntry:
                self._watch(iter_tensors(result), call, begins=True)

    def begin_backward(self) -> None:
        """The backward of a segment begins."""
        self._step.backwards.append(_Backward(self._moments.now()))

    def end_backward(self) -> None:
        """It is over."""
        self._step.backwards[-1].end = self._moments.now()

    def result(self) -> Measured:
        """What was measured so far; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        forwards: dict[int, list[float]] = {}
        backwards: dict[int, list[float]] = {}
        for step in self._steps:
            for sums, samples in zip(self._sums(step), (forwards, backwards), strict=True):
                for (_, unit), seconds in sums.items():
                    samples.setdefault(unit, []).append(seconds)
        walls = [self._moments.seconds(step.start, step.end) for step in self._steps]
        units = {
            unit: (median(found), median(backwards.get(unit, [0.0])))
            for unit, found in forwards.items()
        }
        return Measured(units, median(walls) if walls else 0.0)

    def _watch(self, tensors: Iterable[torch.Tensor], call: int, *, begins: bool) -> None:
        """Notes when the backward reaches the nodes that made these tensors."""
        step = self._step

        def note(_: Any) -> None:
            if step.backwards:
                step.backwards[-1].marks.append((begins, call, self._moments.now()))

        for node in {tensor.grad_fn for tensor in tensors}:
            if node is not None:
                node.register_prehook(note)

    def _sums(self, step: _Step) -> list[dict[tuple[int, int], float]]:
        """Seconds by (microbatch, unit): of forwards, of backwards."""
        forwards: dict[tuple[int, int], float] = {}
        for call in step.calls:
            key = call.microbatch, call.unit
            forwards[key] = forwards.get(key, 0.0) + sum(
                self._moments.seconds(*stretch) for stretch in call.stretches
            )
        backwards: dict[tuple[int, int], float] = {}
        for backward in step.backwards:
            self._add_backward(step.calls, backward, backwards)
        return [forwards, backwards]

    def _add_backward(
        self, calls: list[_Call], backward: _Backward, sums: dict[tuple[int, int], float]
    ) -> None:
        owner = next((call for begins, call, _ in backward.marks if begins), None)
        since = backward.start
        for begins, number, moment in [*backward.marks, (True, None, backward.end)]:
            if owner is not None:
                key = calls[owner].microbatch, calls[owner].unit
                sums[key] = sums.get(key, 0.0) + self._moments.seconds(since, moment)
            since = moment
            if begins:
                owner = number
            elif number == owner:
                owner = _before(calls, number)


def _before(calls: list[_Call], number: int | None) -> int | None:
    """The call before one in its segment; the call itself if it is the first."""
    assert number is not None
    call = calls[number]
    for earlier in range(number - 1, -1, -1):
        other = calls[earlier]
        if (other.microbatch, other.segment) == (call.microbatch, call.segment):
            return earlier
    return number
