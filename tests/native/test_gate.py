"""The bound and the order of the throttled backend, around one that completes on command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.native.built import backend_module

LIMITS = (-1, 1, 3, 8)
COUNT = 20


class Rig:
    """The backend under test around a manual one."""

    def __init__(self, limit: int, *, polls: bool, timeout_s: float = 30) -> None:
        module = backend_module()
        self.inner = module.ManualBackend(polls=polls)
        self.throttled = module.ThrottledBackend(
            self.inner, limit=limit, polls=polls, timeout=timedelta(seconds=timeout_s)
        )

    def reduce(self, number: int) -> Any:
        return self.throttled.allreduce([torch.tensor([number])])


@contextmanager
def running(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Runs `function` beside the block, which must make it end; its exception is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture(params=[True, False], ids=["polls", "waits"])
def polls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("limit", LIMITS)
def test_bound_and_order(limit: int, polls: bool) -> None:
    rig = Rig(limit, polls=polls)
    bound = limit if limit > 0 else COUNT
    begun: list[int] = []

    def reduce_all() -> None:
        for number in range(COUNT):
            begun.append(number)
            rig.reduce(number)

    with running(reduce_all):
        for ended in range(COUNT + 1):
            reached = min(COUNT, ended + bound)
            until(lambda reached=reached: len(rig.inner.issued) == reached)  # type: ignore[misc]
            if reached < COUNT:
                until(lambda reached=reached: len(begun) > reached)  # type: ignore[misc]
                time.sleep(0.02)  # the next one waits, and does not slip through
            assert len(rig.inner.issued) == reached
            if ended < COUNT:
                rig.inner.complete()

    assert rig.inner.issued == [f"allreduce:{number}" for number in range(COUNT)]
    assert rig.inner.max_in_flight == bound
    counters = rig.throttled.counters()
    assert counters["issued"] == COUNT
    assert counters["waited"] == (COUNT - bound if limit > 0 else 0)
    assert counters["max_in_flight"] == (bound if limit > 0 else 0)
    assert (counters["waited_s"] > 0) == (limit > 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_bound_holds_for_several_threads(limit: int, polls: bool) -> None:
    rig = Rig(limit, polls=polls)
    threads = [
        threading.Thread(target=lambda base=base: [rig.reduce(base + k) for k in range(10)])
        for base in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for _ in range(30):
        until(lambda: rig.inner.in_flight > 0)
        rig.inner.complete()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()

    assert rig.inner.max_in_flight <= limit
    issued = [int(name.partition(":")[2]) for name in rig.inner.issued]
    for base in (0, 100, 200):
        assert [n for n in issued if base <= n < base + 100] == list(range(base, base + 10))


def test_point_to_point_is_never_held_back(polls: bool) -> None:
    rig = Rig(1, polls=polls)
    rig.reduce(0)
    for number in range(5):
        rig.throttled.send([torch.tensor([number])], 0, 0)
        rig.throttled.recv([torch.tensor([number])], 0, 0)
    assert len(rig.inner.issued) == 11
    assert rig.throttled.counters()["issued"] == 1
    rig.inner.complete()


def test_coalesced_group_is_not_held_back_and_counts_as_one(polls: bool) -> None:
    rig = Rig(1, polls=polls)
    rig.reduce(0)
    rig.throttled._start_coalescing()
    for number in range(3):
        rig.reduce(number)
    rig.throttled._end_coalescing()
    assert rig.throttled.counters()["in_flight"] == 2
    assert rig.throttled.counters()["issued"] == 2

    with running(lambda: rig.reduce(9)) as thread:
        rig.inner.complete()
        time.sleep(0.02)
        assert thread.is_alive()  # the group is still in flight
        rig.inner.complete()
    rig.inner.complete()


def test_group_of_point_to_point_alone_does_not_count(polls: bool) -> None:
    rig = Rig(1, polls=polls)
    rig.throttled._start_coalescing()
    rig.throttled.send([torch.tensor([0])], 0, 0)
    rig.throttled._end_coalescing()
    assert rig.throttled.counters()["in_flight"] == 0
    rig.reduce(1)  # does not wait
    rig.inner.complete(2)


def test_waiting_reaches_the_inner_work_once() -> None:
    rig = Rig(2, polls=False)
    first, second = rig.reduce(0), rig.reduce(1)
    rig.inner.complete(2)
    for _ in range(3):
        assert first.wait()
    assert first.is_completed()
    assert rig.inner.waits == 1
    rig.reduce(2)  # room already: what was waited for left the count
    assert rig.inner.waits == 1
    rig.inner.complete()
    rig.reduce(3)
    rig.inner.complete()
    rig.reduce(4)  # waits for the second, which the user may still wait for
    assert rig.inner.waits >= 2
    before = rig.inner.waits
    assert second.wait()
    assert rig.inner.waits == before
    rig.inner.complete()


def test_a_wait_that_was_too_short_can_be_repeated() -> None:
    rig = Rig(2, polls=False)
    work = rig.reduce(0)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=10))
    assert rig.throttled.counters()["in_flight"] == 1
    rig.inner.complete()
    assert work.wait()
    assert rig.throttled.counters()["in_flight"] == 0


def test_failure_of_an_earlier_collective_is_raised_once(polls: bool) -> None:
    rig = Rig(1, polls=polls)
    work = rig.reduce(0)
    rig.inner.complete(error="the network is gone")
    with pytest.raises(RuntimeError, match="the network is gone"):
        rig.reduce(1)
    with pytest.raises(RuntimeError, match="the network is gone"):
        work.wait()
    rig.reduce(2)
    rig.inner.complete()


def test_failure_that_the_user_met_is_not_raised_again() -> None:
    rig = Rig(1, polls=False)
    work = rig.reduce(0)
    rig.inner.complete(error="the network is gone")
    with pytest.raises(RuntimeError, match="the network is gone"):
        work.wait()
    rig.reduce(1)
    rig.inner.complete()


def test_abort_ends_a_wait_for_room(polls: bool) -> None:
    rig = Rig(1, polls=polls)
    rig.reduce(0)

    def waits_in_vain() -> None:
        with pytest.raises(RuntimeError, match="aborted"):
            rig.reduce(1)

    with running(waits_in_vain):
        time.sleep(0.02)
        rig.throttled.abort()
    assert rig.inner.is_aborted
    assert rig.throttled.counters()["in_flight"] == 0


def test_wait_for_room_has_the_timeout_of_the_group() -> None:
    rig = Rig(1, polls=True, timeout_s=0.05)
    rig.reduce(0)
    with pytest.raises(torch.distributed.DistBackendError, match="50 ms, the timeout of its group"):
        rig.reduce(1)
    rig.throttled.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(torch.distributed.DistBackendError, match="100 ms"):
        rig.reduce(1)
    rig.inner.complete()


def test_what_the_inner_backend_alone_has_is_reached() -> None:
    rig = Rig(3, polls=True)
    assert rig.throttled.limit == 3
    assert rig.throttled.name() == "smp"
    assert rig.throttled.inner.name() == "manual"
    assert rig.throttled.is_aborted is False
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = rig.throttled.no_such_thing
