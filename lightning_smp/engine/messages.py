"""Which messages each segment of a program sends, in order: pure data, equal on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.program import EVERYWHERE, Edge, Program, SegmentNode, TensorSpec, with_segments
from lightning_smp.schedule import Action, Segment, SegmentGraph
from lightning_smp.schedule import Edge as GraphEdge

__all__ = [
    "MessageKey",
    "Programs",
    "backward_order",
    "forward_messages",
    "gradient_messages",
    "segment_graph",
    "sent",
]

_MIB = 2**20

MessageKey = tuple[str, int, int]
"""Forward ("f") or gradient ("g"), the microbatch, the edge."""

Programs = Sequence[Program] | Mapping[int, Program]
"""By microbatch."""


def forward_messages(program: Program) -> dict[SegmentNode, list[Edge]]:
    """For each segment, the edges it sends while it runs forward, in order."""
    found: dict[SegmentNode, list[Edge]] = {}
    for entry, current in with_segments(program.entries):
        for edge in entry.departures:
            rank = edge.source[0]
            if edge.is_message:
                found.setdefault((rank, current[rank]), []).append(edge)
    return found


def gradient_messages(program: Program) -> dict[SegmentNode, list[Edge]]:
    """For each segment, the edges whose gradients it sends after its backward, in order."""
    found: dict[SegmentNode, list[Edge]] = {}
    for index in sorted(program.gradient_edges):
        edge = program.edges[index]
        if edge.is_message:
            found.setdefault(edge.target, []).append(edge)
    return found


def sent(
    action: Action, programs: Programs
) -> Iterator[tuple[SegmentNode, MessageKey, TensorSpec]]:
    """What an action sends, in order: the segment that awaits it, its key, what it looks like."""
    program, m = programs[action.microbatch], action.microbatch
    node = program.segments[action.segment]
    if action.kind == "F":
        for edge in program.forward_messages.get(node, ()):
            yield edge.target, ("f", m, edge.index), edge.spec
    elif action.kind != "W":
        for edge in program.gradient_messages.get(node, ()):
            yield edge.source, ("g", m, edge.index), edge.spec


def backward_order(program: Program) -> list[SegmentNode]:
    """All segments with a backward, each before those it depends on."""
    return [node for node in reversed(program.segments) if node in program.backward_segments]


def segment_graph(
    program: Program, num_ranks: int, costs: Mapping[int, AtomCost] | None = None
) -> SegmentGraph:
    """The program as the scheduler sees it; memory is in MiB, as in the key of the limit.

    Args:
        program: a complete program.
        num_ranks: number of stages.
        costs: by index of the unit, for what an entry's cost does not say: how a unit's backward
            compares with its forward, and what it keeps. Without them a backward counts twice.
    """
    numbers = {node: number for number, node in enumerate(program.segments)}
    sums = {node: _Sums() for node in program.segments}
    for entry, current in with_segments(program.entries):
        if entry.home != EVERYWHERE:
            unit = entry.key[0][1] if isinstance(entry.key[0], tuple) else -1
            cost = (costs or {}).get(unit)
            sums[entry.home, current[entry.home]].add(entry.cost, cost)
    senders = {program.edges[index].target for index in program.gradient_edges}
    segments = tuple(
        sums[node].segment(node[0], node in program.backward_segments, node in senders)
        for node in program.segments
    )
    pairs: dict[tuple[int, int], bool] = {}
    for edge in program.edges:
        pair = (numbers[edge.source], numbers[edge.target])
        if pair[0] != pair[1]:
            pairs[pair] = pairs.get(pair, False) or edge.index in program.gradient_edges
    for node, number in numbers.items():  # a rank's segments run in their order
        following = numbers.get((node[0], node[1] + 1))
        if following is not None:
            pairs.setdefault((number, following), False)
    edges = tuple(
        GraphEdge(source=source, target=target, has_gradient=flag)
        for (source, target), flag in sorted(pairs.items())
    )
    return SegmentGraph(num_ranks=num_ranks, segments=segments, edges=edges)


@dataclass(slots=True)
class _Sums:
    """What the units of one segment cost together."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    memory: float = 0.0

    def add(self, forward: float, cost: AtomCost | None) -> None:
        """Adds one call of a unit."""
        self.forward += forward
        if cost is None or not cost.forward_s:
            self.backward += 2 * forward
            self.weight += forward
            return
        # The inputs' gradients cost about a forward; what is beyond that makes the weights'.
        backward = forward * cost.backward_s / cost.forward_s
        self.backward += backward
        self.weight += max(0.0, backward - forward)
        self.memory += cost.saved_bytes / max(1, cost.calls) / _MIB

    def segment(self, rank: int, has_backward: bool, sends_gradients: bool) -> Segment:
        """The segment of these units."""
        if not has_backward:
            return Segment(rank, self.forward, 0.0, has_backward=False)
        weight = self.weight if sends_gradients else self.backward
        return Segment(rank, self.forward, self.backward, True, weight, self.memory)
