"""Segment graphs for the tests of the schedules: lines of ranks, and a strategy for any graph."""

from collections.abc import Sequence

from hypothesis import strategies as st

from lightning_smp.schedule import Edge, Segment, SegmentGraph


def line(
    ranks: Sequence[int],
    *,
    costs: Sequence[tuple[float, float]] | None = None,
    transfer: float = 0.0,
    weight: float = 0.0,
    memory: float = 0.0,
) -> SegmentGraph:
    """One segment after the other on the given ranks; a forward costs 1, a backward 2.

    ``weight`` is the part of every backward that may be done later.
    """
    costs = costs or [(1.0, 2.0)] * len(ranks)
    segments = tuple(
        Segment(rank, forward, backward, True, weight, memory)
        for rank, (forward, backward) in zip(ranks, costs, strict=True)
    )
    edges = tuple(Edge(index, index + 1, True, transfer) for index in range(len(ranks) - 1))
    return SegmentGraph(max(ranks) + 1, segments, edges)


_COSTS = st.sampled_from([0.0, 0.1, 1.0, 1.7, 3.0])


@st.composite
def _any_segment(draw: st.DrawFn, num_ranks: int) -> Segment:
    backward = draw(_COSTS)
    return Segment(
        rank=draw(st.integers(0, num_ranks - 1)),
        forward_cost=draw(_COSTS),
        backward_cost=backward,
        has_backward=draw(st.booleans()),
        weight_cost=backward * draw(st.sampled_from([0.0, 0.5, 1.0])),
        memory=draw(_COSTS),
    )


@st.composite
def any_graph(draw: st.DrawFn, num_ranks: int) -> SegmentGraph:
    """A graph with idle ranks, dead ends, skips, doubled edges and parts without a backward."""
    num_segments = draw(st.integers(0, 7))
    segments = tuple(draw(_any_segment(num_ranks)) for _ in range(num_segments))
    pairs = [(i, j) for j in range(num_segments) for i in range(j)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    edges = tuple(
        Edge(
            source,
            target,
            segments[source].has_backward and segments[target].has_backward and draw(st.booleans()),
            draw(_COSTS),
        )
        for source, target in chosen
    )
    return SegmentGraph(num_ranks, segments, edges)


@st.composite
def any_step(draw: st.DrawFn) -> list[SegmentGraph]:
    """The graphs of some microbatches."""
    num_ranks = draw(st.integers(1, 4))
    kinds = draw(st.lists(any_graph(num_ranks), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
