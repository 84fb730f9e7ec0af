import math

import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import Edge, Segment, SegmentGraph

ONE = Segment(0, 1.0, 1.0, True)
FROZEN = Segment(0, 1.0, 0.0, False)


@pytest.mark.parametrize(
    ("num_ranks", "segments", "edges", "message"),
    [
        (0, (), (), "num_ranks is 0"),
        (2, (Segment(2, 1.0, 1.0, True),), (), "segment 0 is on rank 2, but ranks go from 0 to 1"),
        (1, (Segment(0, -1.0, 1.0, True),), (), "segment 0 has forward_cost=-1.0"),
        (1, (Segment(0, 1.0, math.nan, True),), (), "segment 0 has backward_cost=nan"),
        (1, (ONE, ONE), (Edge(1, 0, True),), "must go from an earlier to a later"),
        (1, (ONE, ONE), (Edge(0, 0, True),), "must go from an earlier to a later"),
        (1, (ONE, ONE), (Edge(0, 2, True),), "must go from an earlier to a later"),
        (1, (ONE, ONE), (Edge(0, 1, True, -1.0),), "edge 0 (0->1) has cost=-1.0"),
        (1, (ONE, FROZEN), (Edge(0, 1, True),), "segment 1 has no backward"),
        (1, (FROZEN, ONE), (Edge(0, 1, True),), "segment 0 has no backward"),
    ],
)
def test_problem_is_named(num_ranks, segments, edges, message):
    with pytest.raises(ScheduleError) as error:
        SegmentGraph(num_ranks, segments, edges)
    assert message in str(error.value)


def test_all_problems_are_reported_together():
    with pytest.raises(ScheduleError) as error:
        SegmentGraph(1, (Segment(1, -1.0, 0.0, False),), (Edge(0, 3, False),))
    assert len(str(error.value).splitlines()) == 4


def test_message_crosses_ranks():
    graph = SegmentGraph(
        2, (ONE, Segment(1, 1.0, 1.0, True), ONE), (Edge(0, 1, True), Edge(0, 2, True))
    )
    assert [graph.is_message(edge) for edge in graph.edges] == [True, False]
