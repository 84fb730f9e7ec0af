"""Schedules in files."""

import pytest

from lightning_smp.errors import ScheduleError
from lightning_smp.schedule import (
    Schedule,
    fit_schedule,
    make_schedule,
    read_schedule,
    validate,
    write_schedule,
)

from .graphs import line

GRAPHS = [line([0, 1], memory=1.0)] * 3
BY_HAND = """
# mine
schedule by hand
rank 0: | F0.0 F1.0 .    .    B0.0 F2.0 B1.0 B2.0 |

rank 1: | .    F0.1 B0.1 F1.1 B1.1 .    F2.1 B2.1 |
"""


@pytest.mark.parametrize("pipeline", ["simple", "interleaved", "zero_bubble"])
def test_round_trip(tmp_path, pipeline):
    graphs = [line([0, 1, 0, 1], weight=1.0)] * 3
    schedule = make_schedule(graphs, pipeline)
    write_schedule(tmp_path / "s.txt", schedule, graphs)
    found = read_schedule(tmp_path / "s.txt")
    assert found.ranks == schedule.ranks
    assert found.name == f"{schedule.name} ({tmp_path / 's.txt'})"
    assert "# rank 0  |F0.0" in (tmp_path / "s.txt").read_text()


def test_written_by_hand():
    schedule = Schedule.from_text(BY_HAND)
    validate(GRAPHS, schedule)
    assert list(map(str, schedule.ranks[1])) == ["F0.1", "B0.1", "F1.1", "B1.1", "F2.1", "B2.1"]


def test_columns_are_aligned():
    assert Schedule.from_text("schedule x\nrank 0: F10.0 F0.0\nrank 1: F0.1 F10.1").to_text() == (
        "schedule x\nrank 0: F10.0 F0.0\nrank 1: F0.1  F10.1"
    )


def test_a_table_serves_smaller_steps():
    short = fit_schedule(Schedule.from_text(BY_HAND), GRAPHS[:2])
    assert list(map(str, short.ranks[0])) == ["F0.0", "F1.0", "B0.0", "B1.0"]


def test_a_table_does_not_serve_larger_steps():
    with pytest.raises(ScheduleError, match=r"leaves out F3\.0 of rank 0, B3\.0 of rank 0"):
        fit_schedule(Schedule.from_text(BY_HAND), [*GRAPHS, GRAPHS[0]])


@pytest.mark.parametrize(
    ("old", "new", "options", "message"),
    [
        ("F0.1 B0.1", "B0.1 F0.1", {}, "comes before F0.1"),
        ("B0.0 F2.0", "F2.0 B0.0", {"memory_limit": 2.0}, "brings the activations alive to 3"),
        ("B0.0 F2.0", "F2.0 B0.0", {"active_microbatches": 2}, "begins microbatch 2 while 2"),
        ("F2.1 B2.1", "F2.1", {}, "leaves out B2.1 of rank 1"),
    ],
)  # fmt: skip
def test_edited_table(old, new, options, message):
    text = BY_HAND.replace(old, new)
    assert text != BY_HAND
    with pytest.raises(ScheduleError, match=message) as error:
        fit_schedule(Schedule.from_text(text), GRAPHS, **options)
    assert "^^^^" in str(error.value)
    assert "'by hand'" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F0.0 F1.0 .    .    B0.0", "F0.0 B0.0 F1.0"),
        ("F0.1 B0.1 F1.1 B1.1", "F0.1 F1.1 B1.1 B0.1"),
    ],
)
def test_other_orders_that_work(old, new):
    text = BY_HAND.replace(old, new)
    assert text != BY_HAND
    fit_schedule(Schedule.from_text(text), GRAPHS)


def test_deadlock_is_shown_in_the_grid():
    text = "schedule x\nrank 0: F0.0 B0.0 F1.0 B1.0\nrank 1: F0.1 F1.1 B0.1 B1.1"
    with pytest.raises(ScheduleError, match="deadlocks") as error:
        fit_schedule(Schedule.from_text(text), GRAPHS[:2])
    assert str(error.value).count("^^^^") == 2


def test_unreadable_cell_is_pointed_at(tmp_path):
    path = tmp_path / "s.txt"
    path.write_text("# c\nschedule x\nrank 0: F0.0 G1.0\n")
    with pytest.raises(ScheduleError) as error:
        read_schedule(path)
    first, row, pointer = str(error.value).splitlines()
    assert f"In the schedule file '{path}': Line 3: 'G1.0' is not an action" in first
    assert row[pointer.index("^") :] == "G1.0"


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "none.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "b.txt")
