"""Split backwards, the bound on memory, and the choice between kinds."""

import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import (
    Edge,
    Schedule,
    Segment,
    SegmentGraph,
    list_channels,
    make_schedule,
    simulate,
    validate,
)

from .graphs import line


def step(stages, microbatches, chunks=1, **options):
    options = {"weight": 1.0, "memory": 1.0, **options}
    return [line(list(range(stages)) * chunks, **options)] * microbatches


def timeline(graphs, pipeline, **options):
    schedule = make_schedule(graphs, pipeline, **options)
    validate(graphs, schedule, memory_limit=options.get("memory_limit"))
    return simulate(graphs, schedule)


@pytest.mark.parametrize("stages", range(1, 9))
def test_zero_bubble_meets_the_formula_of_zb_h1(stages):
    """Bubble (p - 1)(F + I - W), activations of 1F1B's first stage (Qi et al. 2023, table 1)."""
    for microbatches in (stages, 2 * stages, 32):
        found = timeline(step(stages, microbatches), "zero_bubble")
        assert found.makespan == pytest.approx(3.0 * microbatches + stages - 1)
        assert max(found.peak_live) == stages


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble", "auto"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_memory_limit_holds_and_costs_time(pipeline, limit, chunks):
    graphs = step(4, 8, chunks)
    limit = limit * chunks
    found = timeline(graphs, pipeline, memory_limit=limit)
    assert max(found.peak_memory) <= limit
    assert found.makespan >= timeline(graphs, pipeline, memory_limit=100.0).makespan


def test_limit_that_nothing_meets_names_what_would():
    with pytest.raises(ScheduleError, match=r"the limit of 0\.5; the least found is 1\."):
        make_schedule(step(4, 8), "zero_bubble", memory_limit=0.5)
    with pytest.raises(ScheduleError, match="the least found is 8"):
        make_schedule(step(4, 8), "simple", memory_limit=4.0)


def test_auto_is_never_longer_than_any_kind():
    for chunks in (1, 2):
        for costs in ([(1.0, 2.0)] * 4, [(1.0, 2.0), (2.0, 4.0), (1.0, 2.0), (3.0, 6.0)]):
            graphs = step(4, 8, chunks, costs=costs * chunks, transfer=0.25)
            auto = timeline(graphs, "auto", memory_limit=6.0).makespan
            for kind in ("interleaved", "zero_bubble"):
                assert auto <= timeline(graphs, kind, memory_limit=6.0).makespan * 1.011


def test_auto_splits_only_for_a_gain():
    whole = make_schedule(step(4, 8, weight=0.0), "auto")
    assert {action.kind for row in whole.ranks for action in row} == {"F", "B"}
    single = make_schedule(step(1, 8), "auto")
    assert {action.kind for action in single.ranks[0]} == {"F", "B"}


def test_parts_that_follow_each_other_are_one_backward():
    """Rank 0 sends no gradient, so nothing is lost."""
    schedule = make_schedule(step(4, 8), "zero_bubble")
    assert {action.kind for action in schedule.ranks[0]} == {"F", "B"}
    assert {action.kind for action in schedule.ranks[3]} >= {"F", "I", "W"}


def test_segment_without_a_second_part_stays_whole():
    segments = (Segment(0, 1.0, 2.0, True, 1.0), Segment(1, 1.0, 2.0, True))
    graphs = [SegmentGraph(2, segments, (Edge(0, 1, True),))] * 4
    schedule = make_schedule(graphs, "zero_bubble")
    assert {action.kind for action in schedule.ranks[1]} == {"F", "B"}


def test_gradients_are_sent_by_the_first_part():
    graphs = step(2, 2)
    text = "schedule x\nrank 0: F0.0 F1.0 B0.0 I1.0 W1.0\nrank 1: F0.1 I0.1 F1.1 I1.1 W0.1 W1.1"
    schedule = Schedule.from_text(text)
    validate(graphs, schedule)
    channel = list_channels(graphs, schedule)[1, 0]
    assert list(map(str, channel.messages)) == ["I0.1->B0.0", "I1.1->I1.0"]
    found = simulate(graphs, schedule)
    assert found.peak_live == (2, 2)
    spans = {str(span.action): (span.start, span.end) for span in found.ranks[0]}
    assert spans["B0.0"] == (3.0, 5.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0.0 I0.0", "leaves out W0.0 of rank 0"),
        ("F0.0 W0.0 I0.0", "W0.0, comes before I0.0"),
        ("F0.0 I0.0 W0.0 B0.0", "its two parts, I and W, are listed too"),
    ],
)
def test_half_a_backward(row, message):
    with pytest.raises(ScheduleError, match=message):
        validate(step(1, 1), Schedule.from_text(f"schedule x\nrank 0: {row}"))


def test_memory_is_checked_at_its_step():
    text = "schedule x\nrank 0: F0.0 F1.0 I0.0 F2.0 W0.0 B1.0 B2.0"
    with pytest.raises(ScheduleError) as error:
        validate(step(1, 3), Schedule.from_text(text), memory_limit=2.0)
    assert "step 3 of rank 0, F2.0, brings the activations alive to 3 (limit 2)" in str(error.value)
    assert str(error.value).splitlines()[2].index("^") == str(error.value).splitlines()[1].index(
        "F2.0"
    )


def test_active_microbatches_count_until_the_second_part():
    graphs = step(4, 8)
    schedule = make_schedule(graphs, "zero_bubble", active_microbatches=2)
    validate(graphs, schedule, active_microbatches=2)


def test_weight_cost_is_a_part_of_the_backward():
    with pytest.raises(ScheduleError, match="cannot exceed it"):
        SegmentGraph(1, (Segment(0, 1.0, 2.0, True, 3.0),), ())
