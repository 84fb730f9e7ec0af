"""The segments of one microbatch and what flows between them, as data for the scheduler.

A segment is what one rank does between two receives that depend on its own work. This module only
describes; it knows no order of execution beyond the program's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_smp.errors import ScheduleError

__all__ = ["Edge", "Segment", "SegmentGraph"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One island of autograd on one rank.

    Attributes:
        rank: Pipeline rank that executes the segment.
        forward_cost: Duration of the forward, in any unit shared by the whole graph.
        backward_cost: Duration of the backward, same unit.
        has_backward: Whether the segment has a backward at all (a cost of 0.0 does not say so).
        weight_cost: The part of ``backward_cost`` that only makes gradients of parameters and may
            be done later; 0.0 where the backward cannot be split.
        memory: What the forward keeps for the backward, in any unit shared by the whole graph.
    """

    rank: int
    forward_cost: float
    backward_cost: float
    has_backward: bool
    weight_cost: float = 0.0
    memory: float = 0.0

    @property
    def can_split(self) -> bool:
        """Whether the backward has a part that may be done later."""
        return self.has_backward and self.weight_cost > 0.0


@dataclass(frozen=True, slots=True)
class Edge:
    """Values that one segment produces and a later one consumes.

    Between two ranks an edge is a message; within one rank it is a carried value and takes no time.
    Several edges may join the same two segments: each is a message of its own.

    Attributes:
        source: Index of the producing segment.
        target: Index of the consuming segment, larger than ``source``.
        has_gradient: Whether a gradient flows from target to source in the backward.
        cost: Transfer time in the unit of the segments' costs, in either direction. Not counted
            within one rank.
    """

    source: int
    target: int
    has_gradient: bool
    cost: float = 0.0


@dataclass(frozen=True)
class SegmentGraph:
    """All segments of one microbatch, in program order, and the edges between them.

    Attributes:
        num_ranks: Number of pipeline ranks; a rank may own no segment.
        segments: Segments in program order, which is a topological order.
        edges: Edges, each from an earlier to a later segment.

    Raises:
        ScheduleError: If ranks or indices are out of range, a cost is negative or not finite, an
            edge points backwards, or a gradient touches a segment without a backward.
    """

    num_ranks: int
    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        """Report every problem of the graph at once."""
        problems = list(_problems(self))
        if problems:
            raise ScheduleError("The segment graph is invalid:\n  " + "\n  ".join(problems))

    def is_message(self, edge: Edge) -> bool:
        """Tell whether the edge crosses ranks."""
        return self.segments[edge.source].rank != self.segments[edge.target].rank


def _problems(graph: SegmentGraph) -> Iterator[str]:
    if graph.num_ranks < 1:
        yield f"num_ranks is {graph.num_ranks}; at least one rank is needed."
    for index, segment in enumerate(graph.segments):
        yield from _segment_problems(graph, index, segment)
    for index, edge in enumerate(graph.edges):
        yield from _edge_problems(graph, index, edge)


def _segment_problems(graph: SegmentGraph, index: int, segment: Segment) -> Iterator[str]:
    if not 0 <= segment.rank < graph.num_ranks:
        yield (
            f"segment {index} is on rank {segment.rank}, but ranks go from 0 to "
            f"{graph.num_ranks - 1}; raise num_ranks or move the segment."
        )
    for name in ("forward_cost", "backward_cost", "weight_cost", "memory"):
        cost = getattr(segment, name)
        if not _is_duration(cost):
            yield f"segment {index} has {name}={cost}; it must be finite and not negative."
    if segment.weight_cost > segment.backward_cost:
        yield (
            f"segment {index} has weight_cost={segment.weight_cost}, which is a part of "
            f"backward_cost={segment.backward_cost} and cannot exceed it."
        )


def _edge_problems(graph: SegmentGraph, index: int, edge: Edge) -> Iterator[str]:
    what = f"edge {index} ({edge.source}->{edge.target})"
    if not _is_duration(edge.cost):
        yield f"{what} has cost={edge.cost}; it must be finite and not negative."
    if not 0 <= edge.source < edge.target < len(graph.segments):
        yield (
            f"{what} must go from an earlier to a later of the {len(graph.segments)} segments; "
            "list the segments in program order."
        )
        return
    for end in (edge.source, edge.target) if edge.has_gradient else ():
        if not graph.segments[end].has_backward:
            yield (
                f"{what} carries a gradient, but segment {end} has no backward; set has_backward "
                "on the segment or clear has_gradient on the edge."
            )


def _is_duration(cost: float) -> bool:
    return math.isfinite(cost) and cost >= 0.0
