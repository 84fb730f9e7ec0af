import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import (
    Edge,
    Schedule,
    Segment,
    SegmentGraph,
    list_channels,
    make_schedule,
)

from .graphs import line


def shown(channels):
    return {pair: [str(m) for m in channel.messages] for pair, channel in channels.items()}


def test_values_go_down_and_gradients_up():
    graphs = [line([0, 1])] * 2
    channels = list_channels(graphs, make_schedule(graphs, "interleaved"))
    assert shown(channels) == {
        (0, 1): ["F0.0->F0.1", "F1.0->F1.1"],
        (1, 0): ["B0.1->B0.0", "B1.1->B1.0"],
    }
    assert {channel.depth for channel in channels.values()} == {1}


def test_carried_values_are_no_messages_and_doubled_edges_are_two():
    segments = (
        Segment(0, 1.0, 1.0, True),
        Segment(1, 1.0, 1.0, True),
        Segment(0, 1.0, 1.0, True),
    )
    edges = (Edge(0, 1, True), Edge(0, 2, True), Edge(1, 2, True), Edge(0, 1, False))
    graphs = [SegmentGraph(2, segments, edges)]
    channels = list_channels(graphs, make_schedule(graphs, "simple"))
    assert shown(channels) == {
        (0, 1): ["F0.0->F0.1", "F0.0->F0.1", "B0.2->B0.1"],
        (1, 0): ["F0.1->F0.2", "B0.1->B0.0"],
    }
    assert [m.edge for m in channels[0, 1].messages] == [0, 3, 2]


def test_depth_counts_receives_posted_ahead():
    graphs = [line([0, 1])] * 3
    schedule = Schedule.from_text(
        "schedule x\nrank 0: F0.0 F1.0 F2.0 B2.0 B1.0 B0.0\nrank 1: F2.1 F0.1 F1.1 B2.1 B1.1 B0.1"
    )
    channels = list_channels(graphs, schedule)
    assert channels[0, 1].depth == 3
    assert channels[1, 0].depth == 1


@pytest.mark.parametrize(("pipeline", "p"), [("simple", 4), ("interleaved", 4), ("interleaved", 8)])
def test_two_sides_of_a_chain_mirror_each_other(pipeline, p):
    graphs = [line(range(p))] * 12
    channels = list_channels(graphs, make_schedule(graphs, pipeline))
    assert {channel.depth for channel in channels.values()} == {1}


def test_unconsumed_message():
    text = "schedule x\nrank 0: F0.0\nrank 1:"
    with pytest.raises(
        ScheduleError, match=r"F0\.0->F0\.1 .* never consumed; add F0\.1 to the row"
    ):
        list_channels([line([0, 1])], Schedule.from_text(text))


def test_message_sent_twice():
    text = "schedule x\nrank 0: F0.0 F0.0\nrank 1: F0.1"
    with pytest.raises(ScheduleError, match="is sent a second time"):
        list_channels([line([0, 1])], Schedule.from_text(text))
