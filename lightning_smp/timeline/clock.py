"""Measures one step on one rank: clocks on the CPU, events on a GPU.

On a GPU nothing is synchronised inside the step: events are recorded on the stream that the work
is on, and are read when the step is over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.timeline.events import Span, StepRecord, Wait
from lightning_smp.timeline.moments import Moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_smp.program import Program
    from lightning_smp.schedule import Action

__all__ = ["StepClock"]


class StepClock:
    """Takes the times of one step.

    Args:
        device: the run's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments = Moments(device)
        self._origin = self._moments.now()
        self._begun: Any = None
        self._actions: list[tuple[Action, Any, Any]] = []
        self._waits: list[tuple[int, Any, Any, Any]] = []

    def begin(self) -> None:
        """An action begins."""
        self._begun = self._moments.now()

    def end(self, action: Action) -> None:
        """The action that began last is over."""
        self._actions.append((action, self._begun, self._moments.now()))

    def wait(self, work: Any, sender: int, key: Hashable) -> None:
        """Waits for a message from a stage."""
        start = self._moments.now()
        work.wait()
        self._waits.append((sender, key, start, self._moments.now()))

    def finish(self, programs: Sequence[Program]) -> StepRecord:
        """What was measured; waits for the device.

        Args:
            programs: of each microbatch.
        """
        last = self._moments.now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = tuple(
            Span(a.kind, a.microbatch, a.segment, self._seconds(start), self._seconds(end))
            for a, start, end in self._actions
        )
        waits = tuple(
            Wait(sender, *_made_by(key, programs), self._seconds(start), self._seconds(end))
            for sender, key, start, end in self._waits
            if isinstance(key, tuple)
        )
        return StepRecord(self._seconds(last), spans, waits)

    def _seconds(self, moment: Any) -> float:
        return self._moments.seconds(self._origin, moment)


def _made_by(key: tuple[Any, ...], programs: Sequence[Program]) -> tuple[bool, int, int]:
    """(is a gradient, microbatch, segment) of the action that made a message."""
    kind, microbatch, index = key
    program = programs[microbatch]
    edge = program.edges[index]
    node = edge.target if kind == "g" else edge.source
    return kind == "g", microbatch, list(program.segments).index(node)
