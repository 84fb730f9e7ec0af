"""What can be read off segment graphs before scheduling: orders of preference, limits, the shape.

All functions are pure and know nothing of candidates; times are in the unit of the graphs' costs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_smp.schedule.graph import SegmentGraph
from lightning_smp.schedule.work import BACKWARD, KINDS, WEIGHT, Work

__all__ = [
    "depth_limits",
    "loops",
    "memory_per_microbatch",
    "memory_per_segment",
    "over_graphs",
    "rank_sequence",
    "roomy_limits",
    "saturation_limits",
    "shortest_step",
    "visits",
    "wave_priority",
    "with_known_costs",
]

_Number = TypeVar("_Number", int, float)


def with_known_costs(graphs: Sequence[SegmentGraph]) -> Sequence[SegmentGraph]:
    """Give every segment the costs 1 and 1 + 1 where no cost of any graph is known (all zero)."""
    segments = [segment for graph in graphs for segment in graph.segments]
    if any(segment.forward_cost or segment.backward_cost for segment in segments):
        return graphs
    known: dict[int, SegmentGraph] = {}
    for graph in graphs:
        if id(graph) not in known:
            costed = tuple(
                replace(
                    segment,
                    forward_cost=1.0,
                    backward_cost=2.0 * segment.has_backward,
                    weight_cost=1.0 * segment.has_backward,
                )
                for segment in graph.segments
            )
            known[id(graph)] = replace(graph, segments=costed)
    return [known[id(graph)] for graph in graphs]


def wave_priority(work: Work, group: int) -> list[tuple[int, ...]]:
    """Order actions so that groups of microbatches pass the segments together.

    A group of one finishes each microbatch before the next; with virtual stages, a group as large
    as the pipeline is the order of interleaved 1F1B (Narayanan et al. 2021, section 2.2). Either is
    one total order per kind that respects the program, whatever the graphs.
    """
    return [
        (
            action.microbatch // group,
            action.segment if action.kind == "F" else -action.segment,
            action.microbatch,
        )
        for action in work.actions
    ]


def over_graphs(
    measure: Callable[[SegmentGraph], list[_Number]], graphs: Sequence[SegmentGraph]
) -> list[_Number]:
    """Take, for each rank, the largest value of the measure over all graphs."""
    distinct = {id(graph): graph for graph in graphs}.values()
    return [max(values) for values in zip(*map(measure, distinct), strict=True)]


def rank_sequence(graph: SegmentGraph) -> tuple[int, ...]:
    """List the rank of each segment."""
    return tuple([segment.rank for segment in graph.segments])


def visits(graph: SegmentGraph) -> list[int]:
    """Count the segments of each rank."""
    counts = [0] * graph.num_ranks
    for segment in graph.segments:
        counts[segment.rank] += 1
    return counts


def loops(graphs: Sequence[SegmentGraph]) -> int:
    """Count how often every microbatch passes all ranks in order (virtual stages); 0 if others."""
    sequences = {rank_sequence(graph) for graph in graphs}
    if len(sequences) != 1:
        return 0
    sequence, num_ranks = sequences.pop(), graphs[0].num_ranks
    count, rest = divmod(len(sequence), num_ranks)
    return 0 if rest or sequence != tuple(range(num_ranks)) * count else count


def memory_per_segment(graph: SegmentGraph) -> list[float]:
    """For each rank, the memory that the largest of its segments keeps."""
    found = [0.0] * graph.num_ranks
    for segment in graph.segments:
        if segment.has_backward:
            found[segment.rank] = max(found[segment.rank], segment.memory)
    return found


def memory_per_microbatch(graph: SegmentGraph) -> list[float]:
    """For each rank, the memory that all of its segments keep."""
    found = [0.0] * graph.num_ranks
    for segment in graph.segments:
        found[segment.rank] += segment.memory * segment.has_backward
    return found


def roomy_limits(depths: Sequence[int]) -> list[int]:
    """For each rank, twice the way to the last rank instead of once: room for transfers.

    On virtual stages this is the warm-up of interleaved 1F1B (Narayanan et al. 2021).
    """
    return [depth + len(depths) - 1 - rank for rank, depth in enumerate(depths)]


def depth_limits(graph: SegmentGraph) -> list[int]:
    """For each rank, the number of segments on the longest path from its first one on.

    On a chain over p ranks that is p - rank: the microbatches 1F1B keeps alive there.
    """
    below = [1] * len(graph.segments)
    for edge in sorted(graph.edges, key=lambda edge: -edge.source):
        below[edge.source] = max(below[edge.source], below[edge.target] + 1)
    limits = [1] * graph.num_ranks
    for segment, depth in zip(graph.segments, below, strict=True):
        limits[segment.rank] = max(limits[segment.rank], depth)
    return limits


def saturation_limits(graph: SegmentGraph) -> list[int]:
    """For each rank, the microbatches that must be open there to keep the slowest rank busy.

    Little's law: the time one microbatch, alone, stays open on the rank, over the time between two
    microbatches, which is all the work of the slowest rank.
    """
    ready, returned = _lone_times(graph)
    load = [0.0] * graph.num_ranks
    opened = [math.inf] * graph.num_ranks
    closed = [0.0] * graph.num_ranks
    for index, segment in enumerate(graph.segments):
        rank = segment.rank
        load[rank] += segment.forward_cost + segment.backward_cost * segment.has_backward
        opened[rank] = min(opened[rank], ready[index])
        closed[rank] = max(closed[rank], returned[index])
    slowest = max(load)
    if slowest <= 0.0:
        return [1] * graph.num_ranks
    stays = [max(0.0, close - start) for start, close in zip(opened, closed, strict=True)]
    return [max(1, math.ceil(stay / slowest - 1e-6)) for stay in stays]


def shortest_step(work: Work, graphs: Sequence[SegmentGraph]) -> float:
    """Return a time that no order can beat: a rank's wait, all its work, and what must follow it.

    Waits are known for loops only. Nothing need follow where backwards are split: the last action
    on a rank may be one that no other waits for.
    """
    load = [0.0] * work.num_ranks
    kinds = [0] * KINDS
    for name in work.todo:
        load[work.ranks[name]] += work.costs[name]
        kinds[name % KINDS] += 1
    num_backwards = sum(segment.has_backward for graph in graphs for segment in graph.segments)
    if not loops(graphs) or kinds[BACKWARD] < num_backwards:
        return max(load)
    waits, tails = [math.inf] * work.num_ranks, [math.inf] * work.num_ranks
    for graph in {id(graph): graph for graph in graphs}.values():
        ready, returned = _lone_times(graph)
        whole = max(returned)
        for rank, last in enumerate(returned[: work.num_ranks]):
            waits[rank] = min(waits[rank], ready[rank])
            tails[rank] = min(tails[rank], whole - last)
    if kinds[WEIGHT]:
        tails = [0.0] * work.num_ranks
    return max(map(sum, zip(waits, load, tails, strict=True)))


def _lone_times(graph: SegmentGraph) -> tuple[list[float], list[float]]:
    """Start of each forward and end of each backward when nothing else runs.

    Backwards begin when all forwards are over; a segment without one returns at its forward's end.
    """
    starts = [0.0] * len(graph.segments)
    edges = sorted(graph.edges, key=lambda edge: edge.source)
    for edge in edges:
        end = starts[edge.source] + graph.segments[edge.source].forward_cost
        delay = edge.cost if graph.is_message(edge) else 0.0
        starts[edge.target] = max(starts[edge.target], end + delay)
    ends = [s + seg.forward_cost for s, seg in zip(starts, graph.segments, strict=True)]
    begin = [max(ends, default=0.0)] * len(graph.segments)
    for edge in reversed(edges):
        if edge.has_gradient:
            end = begin[edge.target] + graph.segments[edge.target].backward_cost
            delay = edge.cost if graph.is_message(edge) else 0.0
            begin[edge.source] = max(begin[edge.source], end + delay)
    returned = [
        begin[index] + segment.backward_cost if segment.has_backward else ends[index]
        for index, segment in enumerate(graph.segments)
    ]
    return starts, returned
