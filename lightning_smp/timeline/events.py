"""What is measured on one rank during one step. Times are seconds from a start common to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Span", "StepRecord", "Wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of the schedule.

    Attributes:
        kind: "F", "B", "I" or "W", as in a schedule.
        microbatch: which one.
        segment: index in the program's segments.
        start: seconds.
        end: seconds, waits included.
    """

    kind: str
    microbatch: int
    segment: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which a rank waited for a message.

    Attributes:
        sender: stage that the message came from.
        is_gradient: whether the message was a gradient.
        microbatch: which one.
        segment: index of the segment whose action made it.
        start: seconds.
        end: seconds.
    """

    sender: int
    is_gradient: bool
    microbatch: int
    segment: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank's step.

    Attributes:
        wall: seconds from the common start to the end of the step.
        spans: the actions, in order.
        waits: the waits, in order; they lie within spans or between them.
    """

    wall: float
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]

    def to_plain(self) -> list[Any]:
        """As plain data, for another rank."""
        spans = [[s.kind, s.microbatch, s.segment, s.start, s.end] for s in self.spans]
        waits = [
            [w.sender, w.is_gradient, w.microbatch, w.segment, w.start, w.end] for w in self.waits
        ]
        return [self.wall, spans, waits]

    @classmethod
    def from_plain(cls, data: list[Any]) -> StepRecord:
        """The record that another rank wrote by `to_plain`."""
        wall, spans, waits = data
        return cls(wall, tuple(Span(*span) for span in spans), tuple(Wait(*wait) for wait in waits))
