"""Which messages each segment of a program sends, in order: pure data, equal on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_smp.program import EVERYWHERE, Edge, Program, SegmentNode
from lightning_smp.schedule import Action, Segment, SegmentGraph
from lightning_smp.schedule import Edge as GraphEdge

__all__ = ["backward_order", "forward_messages", "gradient_messages", "inbound", "segment_graph"]

MessageKey = tuple[str, int, int]


def forward_messages(program: Program) -> dict[SegmentNode, list[Edge]]:
    """For each segment, the edges it sends while it runs forward, in order."""
    current: dict[int, int] = {}
    found: dict[SegmentNode, list[Edge]] = {}
    for entry in program.entries:
        for rank in entry.new_segments:
            current[rank] = current.get(rank, 0) + 1
        for edge in entry.departures:
            rank = edge.source[0]
            found.setdefault((rank, current.get(rank, 0)), []).append(edge)
    return found


def gradient_messages(program: Program) -> dict[SegmentNode, list[Edge]]:
    """For each segment, the edges whose gradients it sends after its backward, in order."""
    found: dict[SegmentNode, list[Edge]] = {}
    for index in sorted(program.gradient_edges):
        edge = program.edges[index]
        if edge.is_message:
            found.setdefault(edge.target, []).append(edge)
    return found


def inbound(
    row: Sequence[Action], programs: Sequence[Program], sender: int, receiver: int
) -> Iterator[tuple[MessageKey, Edge]]:
    """What ``receiver`` gets from ``sender``, in the order of the sender's actions."""
    for action in row:
        program = programs[action.microbatch]
        node = program.segments[action.segment]
        if action.kind == "F":
            for edge in program.forward_messages.get(node, ()):
                if edge.target[0] == receiver:
                    yield ("f", action.microbatch, edge.index), edge
        else:
            for edge in program.gradient_messages.get(node, ()):
                if edge.source[0] == receiver:
                    yield ("g", action.microbatch, edge.index), edge


def backward_order(program: Program) -> list[SegmentNode]:
    """All segments with a backward, each before those it depends on."""
    return [node for node in reversed(program.segments) if node in program.backward_segments]


def segment_graph(program: Program, num_ranks: int) -> SegmentGraph:
    """The program as the scheduler sees it."""
    numbers = {node: number for number, node in enumerate(program.segments)}
    costs = dict.fromkeys(program.segments, 0.0)
    current: dict[int, int] = {}
    for entry in program.entries:
        for rank in entry.new_segments:
            current[rank] = current.get(rank, 0) + 1
        if entry.home != EVERYWHERE:
            costs[(entry.home, current.get(entry.home, 0))] += entry.cost
    segments = tuple(
        Segment(
            rank=node[0],
            forward_cost=costs[node],
            backward_cost=2 * costs[node] if node in program.backward_segments else 0.0,
            has_backward=node in program.backward_segments,
        )
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
