import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import Action, Schedule
from lightning_smp.schedule.actions import format_grid

ACTIONS = st.builds(Action, st.sampled_from(["F", "B"]), st.integers(0, 999), st.integers(0, 99))
NAMES = st.text("abc, 123", min_size=1).map(lambda name: " ".join(name.split()))


@given(st.lists(st.lists(ACTIONS).map(tuple), min_size=1).map(tuple), NAMES)
def test_text_round_trip(ranks, name):
    schedule = Schedule(ranks, name=name)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_text_has_a_row_per_rank():
    schedule = Schedule(((Action("F", 3, 1), Action("B", 3, 1)), ()), name="two lines\nas one")
    assert schedule.to_text() == "schedule two lines as one\nrank 0: F3.1 B3.1\nrank 1:"


@pytest.mark.parametrize("text", ["", "F3", "f3.1", "F3.1 ", "X3.1", "F-1.0", "F\u0663.1"])
def test_bad_action(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.from_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with"),
        ("scheduled\nrank 0:", "begins with"),
        ("schedule x\nrank 1: F0.0", "Row 0"),
        ("schedule x\nrank 0: F0.0\nF1.0", "Row 1"),
        ("schedule x\nrank 0: F0.0 F1", "'F1' is not an action"),
    ],
)
def test_bad_schedule(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


def test_grid_points_at_the_step():
    schedule = Schedule.from_text("schedule x\nrank 0: F0.0 F1.0 F2.0\nrank 1: F0.1")
    assert format_grid(schedule, marks={0: 1}) == (
        "  rank 0  | F0.0 F1.0 F2.0\n                 ^^^^\n  rank 1  | F0.1"
    )


def test_grid_of_a_long_schedule_shows_the_surroundings():
    row = " ".join(f"F{m}.0" for m in range(100))
    schedule = Schedule.from_text(f"schedule x\nrank 0: {row}")
    shown, caret = format_grid(schedule, marks={0: 50}).splitlines()
    assert shown.endswith(" ...")
    assert "F49.0" in shown
    assert "F10.0" not in shown
    assert shown[caret.index("^") :].startswith("F50.0")
