import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import Edge, Schedule, Segment, SegmentGraph, simulate

from .graphs import line


def times(timeline):
    return [[(str(span.action), span.start, span.end) for span in row] for row in timeline.ranks]


def test_two_ranks_by_hand():
    schedule = Schedule.from_text(
        "schedule 1F1B\nrank 0: F0.0 F1.0 B0.0 B1.0\nrank 1: F0.1 B0.1 F1.1 B1.1"
    )
    timeline = simulate([line([0, 1], transfer=0.5)] * 2, schedule)
    assert times(timeline) == [
        [("F0.0", 0.0, 1.0), ("F1.0", 1.0, 2.0), ("B0.0", 5.0, 7.0), ("B1.0", 8.0, 10.0)],
        [("F0.1", 1.5, 2.5), ("B0.1", 2.5, 4.5), ("F1.1", 4.5, 5.5), ("B1.1", 5.5, 7.5)],
    ]
    assert timeline.makespan == 10.0
    assert timeline.idle_share == pytest.approx((0.4, 0.4))
    assert timeline.bubble == pytest.approx(0.4)
    assert timeline.peak_live == (2, 1)


def test_u_shape_by_hand():
    """The middle segment of rank 0 is carried to its last one without a transfer time."""
    segments = (
        Segment(0, 1.0, 2.0, True),
        Segment(1, 3.0, 4.0, True),
        Segment(0, 0.5, 0.5, True),
    )
    edges = (Edge(0, 1, True, 0.25), Edge(0, 2, True, 99.0), Edge(1, 2, True, 0.25))
    schedule = Schedule.from_text("schedule U\nrank 0: F0.0 F0.2 B0.2 B0.0\nrank 1: F0.1 B0.1")
    timeline = simulate([SegmentGraph(2, segments, edges)], schedule)
    assert times(timeline) == [
        [("F0.0", 0.0, 1.0), ("F0.2", 4.5, 5.0), ("B0.2", 5.0, 5.5), ("B0.0", 10.0, 12.0)],
        [("F0.1", 1.25, 4.25), ("B0.1", 5.75, 9.75)],
    ]
    assert timeline.peak_live == (2, 1)


def test_nothing_is_alive_where_no_backward_follows():
    schedule = Schedule.from_text("schedule x\nrank 0: F0.0 F1.0\nrank 1: F0.1 F1.1")
    timeline = simulate([line([0, 1])] * 2, schedule)
    assert timeline.peak_live == (0, 0)
    assert timeline.makespan == 3.0


def test_rank_without_actions_is_idle():
    graph = SegmentGraph(2, (Segment(0, 1.0, 1.0, True),), ())
    timeline = simulate([graph], Schedule.from_text("schedule x\nrank 0: F0.0 B0.0\nrank 1:"))
    assert timeline.idle_share == (0.0, 1.0)


def test_empty_step_takes_no_time():
    timeline = simulate([SegmentGraph(1, (), ())], Schedule(((),)))
    assert (timeline.makespan, timeline.idle_share) == (0.0, (0.0,))


def test_deadlock_names_the_blocked_action_of_each_rank():
    schedule = Schedule.from_text("schedule bad\nrank 0: F0.0 B0.0 F1.0\nrank 1: F0.1 F1.1 B0.1")
    with pytest.raises(ScheduleError) as error:
        simulate([line([0, 1])] * 2, schedule)
    message = str(error.value)
    assert "'bad' deadlocks" in message
    assert "rank 0 is blocked at B0.0, waiting for B0.1 on rank 1\n" in message
    assert "rank 1 is blocked at F1.1, waiting for F1.0 on rank 0\n" in message
    assert message.count("^^^^") == 2


def test_waiting_for_what_nobody_executes():
    with pytest.raises(ScheduleError, match=r"F0\.0 on rank 0 \(which no rank executes\)"):
        simulate([line([0, 1])], Schedule.from_text("schedule x\nrank 0:\nrank 1: F0.1"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("rank 0: F0.0", "has 1 ranks, the segment graphs have 2"),
        (
            "rank 0: F7.0\nrank 1:",
            "step 0 of rank 0, F7.0, is not part of the work: there are 2 mic",
        ),
        ("rank 0: F0.2\nrank 1:", "microbatch 0 has 2 segments"),
        ("rank 0:\nrank 1: F0.1 F0.0", "step 1 of rank 1, F0.0, belongs to rank 0"),
        ("rank 0: F0.0 F0.0\nrank 1:", "step 1 of rank 0, F0.0, is listed a second time"),
    ],
)
def test_misplaced_action(rows, message):
    with pytest.raises(ScheduleError) as error:
        simulate([line([0, 1])] * 2, Schedule.from_text(f"schedule x\n{rows}"))
    assert message in str(error.value)


def test_backward_of_a_frozen_segment():
    graph = SegmentGraph(1, (Segment(0, 1.0, 0.0, False),), ())
    with pytest.raises(ScheduleError, match="has no backward here"):
        simulate([graph], Schedule.from_text("schedule x\nrank 0: F0.0 B0.0"))


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "at least one microbatch"),
        ([line([0]), line([0, 1])], r"\[1, 2\] ranks"),
    ],
)
def test_request_that_makes_no_sense(graphs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(graphs, Schedule(((),)))
