"""Accounting of measured steps, on made-up ones whose parts are known."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.timeline import (
    Span,
    StepRecord,
    Wait,
    accounts,
    bubble,
    chrome_trace,
    pixels,
    svg,
)

# Two stages, two microbatches, forwards then backwards of one second each; messages take 0.25 s.
FIRST = StepRecord(
    10.0,
    (
        Span("F", 0, 0, 0.5, 1.5),
        Span("F", 1, 0, 1.5, 2.5),
        Span("B", 0, 0, 2.5, 5.0),
        Span("B", 1, 0, 5.0, 7.5),
    ),
    (Wait(1, True, 0, 0, 2.5, 4.0), Wait(1, True, 1, 0, 5.0, 6.5)),
)
SECOND = StepRecord(
    10.0,
    (
        Span("F", 0, 0, 0.5, 2.75),
        Span("B", 0, 0, 2.75, 3.75),
        Span("F", 1, 0, 4.0, 5.0),
        Span("B", 1, 0, 5.0, 6.0),
    ),
    (Wait(0, False, 0, 0, 0.5, 1.75),),
)


def test_each_kind_of_idle_time_is_found() -> None:
    first, second = accounts([FIRST, SECOND])
    assert (first.work, first.warmup_drain) == (pytest.approx(4.0), 0.0)
    assert first.communication == pytest.approx(0.25 + 0.5)  # from 3.75 and 6.0 on
    assert first.imbalance == pytest.approx(1.25 + 1.0)
    assert first.host == pytest.approx(10.0 - 7.0)
    assert second.work == pytest.approx(4.0)
    assert second.communication == pytest.approx(0.25)
    assert second.warmup_drain == pytest.approx(
        1.0 + 1.5
    )  # waits from 0.5 to 1.5; ends at 6 of 7.5
    assert bubble([first, second]) == pytest.approx(0.6)


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.floats(0.0, 2.0))
def test_the_parts_always_add_up_to_the_wall_time(cuts: list[float], rest: float) -> None:
    a, b, c, d, e, f, g, h = sorted(cuts)
    rank = StepRecord(
        h + rest,
        (Span("F", 0, 0, a, d), Span("B", 0, 0, e, h)),
        (Wait(1, False, 0, 0, b, c), Wait(1, True, 0, 0, f, g)),
    )
    for account in accounts([rank, FIRST]):
        parts = (account.warmup_drain, account.imbalance, account.communication, account.host)
        assert account.work + sum(parts) == pytest.approx(account.wall)
        assert min(account.work, *parts[:3]) >= -1e-12


def test_a_stage_without_actions_only_waits_for_the_others() -> None:
    empty = StepRecord(8.0, (), ())
    account = accounts([FIRST, SECOND, empty])[2]
    assert (account.work, account.warmup_drain, account.host) == (0.0, 7.5, 0.5)


def test_records_travel_as_plain_data() -> None:
    assert StepRecord.from_plain(json.loads(json.dumps(FIRST.to_plain()))) == FIRST


def test_the_pictures_show_every_action_and_wait() -> None:
    boxes = len(FIRST.spans + SECOND.spans + FIRST.waits + SECOND.waits)
    root = ElementTree.fromstring(svg([FIRST, SECOND], "step 3"))
    titles = [element for element in root.iter() if element.tag.endswith("title")]
    assert len(titles) == boxes
    events = json.loads(chrome_trace([FIRST, SECOND]))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == boxes
    assert max(event.get("dur", 0) for event in events) == pytest.approx(2.5e6)
    image = pixels([FIRST, SECOND], width=100, row=10)
    assert image.shape == (20, 100, 3)
    assert image.dtype == torch.uint8
    assert image[5, 7].tolist() == image[5, 20].tolist() != image[5, 60].tolist()
