import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import Schedule, SegmentGraph, validate

from .graphs import line

GRAPHS = [line([0, 1])] * 2
GOOD = "schedule x\nrank 0: F0.0 F1.0 B0.0 B1.0\nrank 1: F0.1 B0.1 F1.1 B1.1"


def refusal(text, graphs=GRAPHS, **options):
    with pytest.raises(ScheduleError) as error:
        validate(graphs, Schedule.from_text(text), **options)
    return str(error.value)


def test_good_schedule():
    validate(GRAPHS, Schedule.from_text(GOOD), active_microbatches=2)


def test_missing_action():
    message = refusal(GOOD.replace(" B0.1", ""))
    assert "leaves out B0.1 of rank 1;" in message
    assert message.endswith("^^^^")


def test_many_missing_actions_are_counted():
    assert "and 4 more" in refusal("schedule x\nrank 0:\nrank 1:", graphs=[line([0, 1])] * 3)


def test_backward_before_its_forward():
    message = refusal(GOOD.replace("F0.1 B0.1", "B0.1 F0.1"))
    assert "step 0 of rank 1, B0.1, comes before F0.1 (step 1)" in message


def test_segments_of_a_rank_keep_the_program_order():
    """Even without an edge: a rank's forward of a microbatch is one run of the program."""
    graph = line([0, 0])
    free = SegmentGraph(1, graph.segments, ())
    message = refusal("schedule x\nrank 0: F0.1 F0.0 B0.0 B0.1", graphs=[free])
    assert "F0.1, comes before F0.0" in message
    validate([free], Schedule.from_text("schedule x\nrank 0: F0.0 F0.1 B0.0 B0.1"))


def test_deadlock_across_ranks():
    text = "schedule x\nrank 0: F0.0 B0.0 F1.0 B1.0\nrank 1: F0.1 F1.1 B0.1 B1.1"
    assert "deadlocks" in refusal(text)


def test_limit_of_active_microbatches():
    message = refusal(GOOD, active_microbatches=1)
    assert "step 1 of rank 0, F1.0, begins microbatch 1 while 1 are active (limit 1)" in message
    assert message.splitlines()[2].index("^") == message.splitlines()[1].index("F1.0")


def test_forward_only():
    text = "schedule x\nrank 0: F0.0 F1.0\nrank 1: F0.1 F1.1"
    validate(GRAPHS, Schedule.from_text(text), forward_only=True, active_microbatches=1)
    assert "leaves out" in refusal(text)
