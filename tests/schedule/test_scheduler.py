import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import (
    Action,
    Schedule,
    Segment,
    SegmentGraph,
    list_channels,
    make_schedule,
    simulate,
    validate,
)
from lightning_smp.schedule import Edge as GraphEdge
from lightning_smp.schedule.shape import loops

from .graphs import any_step, line


def textbook_1f1b(p, m):
    """Warm up with p - rank - 1 forwards, then one forward and one backward, then the rest."""
    rows = []
    for rank in range(p):
        forwards = [Action("F", i, rank) for i in range(m)]
        backwards = [Action("B", i, rank) for i in range(m)]
        warm_up = min(m, p - rank - 1)
        row, forwards = forwards[:warm_up], forwards[warm_up:]
        for forward, backward in zip(forwards, backwards, strict=False):
            row += [forward, backward]
        rows.append(tuple(row + backwards[len(forwards) :]))
    return tuple(rows)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("costs", [(1.0, 2.0), (1.0, 1.0), (0.3, 0.1), (0.0, 0.0)])
def test_chain_of_equal_costs_is_textbook_1f1b(p, costs):
    graph = line(range(p), costs=[costs] * p)
    for m in range(1, 33) if costs == (1.0, 2.0) else (1, p, 2 * p + 1):
        schedule = make_schedule([graph] * m, "interleaved")
        assert schedule.ranks == textbook_1f1b(p, m), schedule.name
        validate([graph] * m, schedule, active_microbatches=p)


@pytest.mark.parametrize("p", range(1, 9))
def test_1f1b_meets_the_formula(p):
    for m in (p, 3 * p, 32):
        graphs = [line(range(p))] * m
        timeline = simulate(graphs, make_schedule(graphs, "interleaved"))
        assert timeline.makespan == pytest.approx((m + p - 1) * 3.0)
        assert timeline.peak_live == tuple(min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize("p", range(1, 9))
def test_simple_is_all_forwards_then_all_backwards(p):
    for m in (1, p, 13):
        schedule = make_schedule([line(range(p))] * m, "simple", active_microbatches=1)
        assert schedule.ranks == tuple(
            tuple(Action(kind, i, rank) for kind in ("F", "B") for i in range(m))
            for rank in range(p)
        )


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_virtual_stages_divide_the_bubble(p, v):
    """Interleaved 1F1B: the bubble shrinks by the number of segments a rank has."""
    m = 2 * p
    graphs = [line(list(range(p)) * v)] * m
    schedule = make_schedule(graphs, "interleaved", active_microbatches=2 * p)
    assert simulate(graphs, schedule).makespan <= 3.0 * (m * v + p - 1) * (1 + 1e-9)


def test_transfers_are_hidden_by_more_warm_up():
    graphs = [line(range(4), transfer=1.0)] * 16
    strict = Schedule(textbook_1f1b(4, 16))
    timeline = simulate(graphs, make_schedule(graphs, "interleaved"))
    assert timeline.makespan < 0.8 * simulate(graphs, strict).makespan


@pytest.mark.parametrize("active", [1, 2, 3])
def test_active_limit_below_the_number_of_ranks(active):
    graphs = [line(range(4))] * 8
    schedule = make_schedule(graphs, "interleaved", active_microbatches=active)
    validate(graphs, schedule, active_microbatches=active)
    assert max(simulate(graphs, schedule).peak_live) == active


def test_forward_only():
    graphs = [line([0, 1, 0])] * 5
    for pipeline in ("simple", "interleaved"):
        schedule = make_schedule(graphs, pipeline, forward_only=True)
        validate(graphs, schedule, forward_only=True)
        assert simulate(graphs, schedule).makespan == 10.0


def test_step_without_any_action():
    empty = SegmentGraph(3, (), ())
    assert make_schedule([empty] * 2, "interleaved").ranks == ((), (), ())


def test_one_long_forward_is_worth_waiting_for():
    """Unequal stages: never longer than strict 1F1B."""
    graph = line(range(4), costs=[(1.0, 2.0), (2.0, 4.0), (0.5, 1.0), (3.0, 6.0)])
    graphs = [graph] * 12
    best = simulate(graphs, make_schedule(graphs, "interleaved")).makespan
    assert best <= simulate(graphs, Schedule(textbook_1f1b(4, 12))).makespan


def test_microbatch_that_skips_the_first_rank_waits_for_its_turn():
    """Microbatch 1 could begin at once on rank 1; beginning in order prevents a deadlock."""
    late = SegmentGraph(2, (Segment(1, 1.0, 1.0, True), Segment(0, 1.0, 1.0, True)), ())
    graphs = [line([0, 1]), late] * 3
    schedule = make_schedule(graphs, "interleaved", active_microbatches=1)
    validate(graphs, schedule, active_microbatches=1)


@settings(max_examples=300, deadline=None)
@given(
    any_step(),
    st.sampled_from(["simple", "interleaved", "zero_bubble", "auto"]),
    st.one_of(st.none(), st.integers(1, 7)),
    st.booleans(),
)
def test_any_step_gets_a_valid_schedule(graphs, pipeline, active, forward_only):
    options = {"active_microbatches": active, "forward_only": forward_only}
    schedule = make_schedule(graphs, pipeline, **options)
    ranks = graphs[0].num_ranks
    spare = max(ranks, 2) if loops(graphs) > 1 else 2
    limit = active if active is not None else ranks + spare
    limit = None if pipeline == "simple" else limit
    validate(graphs, schedule, active_microbatches=limit, forward_only=forward_only)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert_begins_in_order(schedule)
    assert_messages_are_complete(graphs, schedule, forward_only=forward_only)
    copies = [SegmentGraph(g.num_ranks, g.segments, g.edges) for g in graphs]
    assert make_schedule(copies, pipeline, **options) == schedule
    if pipeline == "simple":
        for row in schedule.ranks:
            assert [a.kind for a in row] == sorted((a.kind for a in row), reverse=True)


def assert_begins_in_order(schedule):
    for row in schedule.ranks:
        begun = list(dict.fromkeys(a.microbatch for a in row if a.kind == "F"))
        assert begun == sorted(begun)


def assert_messages_are_complete(graphs, schedule, *, forward_only):
    expected = 0
    for graph in graphs:
        messages = [edge for edge in graph.edges if graph.is_message(edge)]
        expected += len(messages) + sum(edge.has_gradient for edge in messages) * (not forward_only)
    channels = list_channels(graphs, schedule).values()
    assert sum(len(channel.messages) for channel in channels) == expected
    assert all(1 <= channel.depth <= len(channel.messages) for channel in channels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "1f1b"}, "choose 'simple', 'interleaved', 'zero_bubble' or 'auto'"),
        ({"pipeline": "interleaved", "active_microbatches": 0}, "at least one microbatch"),
    ],
)
def test_bad_request(options, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule([line([0, 1])] * 4, options.pop("pipeline"), **options)


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble", "auto"])
def test_no_backward_before_the_forward_of_its_microbatch_has_ended_on_the_rank(
    pipeline: str,
) -> None:
    """Until then a rank cannot know that the microbatch leaves its program."""
    reads = SegmentGraph(  # rank 0 computes, then waits for a number that the last rank made
        num_ranks=2,
        segments=(
            Segment(0, 1.0, 2.0, True),
            Segment(1, 1.0, 2.0, True),
            Segment(0, 0.0, 0.0, False),
        ),
        edges=(GraphEdge(0, 1, True), GraphEdge(1, 2, False), GraphEdge(0, 2, False)),
    )
    schedule = make_schedule([reads] * 4, pipeline)
    for m in range(4):
        row = schedule.ranks[0]
        assert row.index(Action("B", m, 0)) > row.index(Action("F", m, 2))
