"""Forwards that stop in the middle: one at a time, in the modes of the step, none lost."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_smp.engine.fiber import Fiber, FiberPool, ThreadModes


@pytest.fixture
def pool() -> Iterator[FiberPool]:
    pool = FiberPool()
    yield pool
    pool.close()


def test_fibers_take_turns(pool: FiberPool) -> None:
    seen: list[str] = []
    fibers: dict[str, Fiber] = {}

    def work(name: str) -> str:
        for part in range(3):
            seen.append(f"{name}{part}")
            fibers[name].suspend()
        return name.upper()

    for name in "ab":
        fibers[name] = Fiber(pool, lambda name=name: work(name), ThreadModes())
    assert seen == []
    for _ in range(4):
        for fiber in fibers.values():
            fiber.resume()
    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [(f.done, f.result) for f in fibers.values()] == [(True, "A"), (True, "B")]


def test_blocks_with_a_default_dtype_may_end_in_any_order(pool: FiberPool) -> None:
    seen: list[torch.dtype] = []
    fibers: list[Fiber] = []
    former = torch.get_default_dtype()

    def work(own: Fiber | None) -> None:
        torch.set_default_dtype(torch.float64)
        if own is None:
            fibers.append(Fiber(pool, lambda: work(fibers[0]), modes))
            fibers[0].resume()
        else:
            seen.append(torch.get_default_dtype())
            own.suspend()
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(former)

    modes = ThreadModes()
    try:
        work(None)
        fibers[0].resume()
        assert seen == [torch.float64] * 3
        assert torch.get_default_dtype() is former
    finally:
        torch.set_default_dtype(former)


def test_a_fiber_starts_with_the_default_dtype_of_its_modes(pool: FiberPool) -> None:
    former, modes = torch.get_default_dtype(), ThreadModes()
    fiber = Fiber(pool, torch.get_default_dtype, modes)
    torch.set_default_dtype(torch.float64)
    try:
        fiber.resume()
        assert fiber.result is former
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(former)


def test_error_reaches_who_resumes(pool: FiberPool) -> None:
    def fail() -> None:
        raise KeyError("inside")

    fiber = Fiber(pool, fail, ThreadModes())
    with pytest.raises(KeyError, match="inside"):
        fiber.resume()
    assert fiber.done


def test_cancelling_runs_the_cleanup(pool: FiberPool) -> None:
    seen: list[str] = []

    def work() -> None:
        try:
            fiber.suspend()
            seen.append("went on")
        finally:
            seen.append("cleaned")

    fiber = Fiber(pool, work, ThreadModes())
    fiber.resume()
    fiber.cancel()
    fiber.cancel()
    assert seen == ["cleaned"]
    assert fiber.done


def test_cancelling_before_the_start_runs_nothing(pool: FiberPool) -> None:
    seen: list[int] = []
    fiber = Fiber(pool, lambda: seen.append(1), ThreadModes())
    fiber.cancel()
    assert fiber.done
    assert seen == []


def test_modes_are_those_that_are_given(pool: FiberPool) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")

    def modes() -> tuple[bool, bool, torch.dtype, str]:
        return (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"), variable.get())  # fmt: skip

    outside = ThreadModes()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        variable.set("the block's")
        fibers = [Fiber(pool, modes, given) for given in (ThreadModes(), outside, outside)]
    for fiber in fibers:
        fiber.resume()
    assert fibers[0].result == (False, True, torch.bfloat16, "the block's")
    assert fibers[1].result[:2] == (True, False)
    assert fibers[1].result[3] == fibers[2].result[3] == "mine"


def test_inference_mode_is_kept(pool: FiberPool) -> None:
    with torch.inference_mode():
        fiber = Fiber(pool, torch.is_inference_mode_enabled, ThreadModes())
        fiber.resume()
    assert fiber.result is True


def test_threads_are_reused(pool: FiberPool) -> None:
    threads = []
    for _ in range(5):
        fiber = Fiber(pool, threading.get_ident, ThreadModes())
        fiber.resume()
        while not pool._idle:  # the thread returns a moment after it handed over control
            pass
        threads.append(fiber.result)
    assert len(set(threads)) == 1


def test_threads_end_with_their_pool() -> None:
    def num_workers() -> int:
        return sum(thread.name == "smp-forward" for thread in threading.enumerate())

    before = num_workers()
    pool = FiberPool()
    suspended: list[Fiber] = []
    done = Fiber(pool, lambda: None, ThreadModes())

    def wait() -> None:
        suspended[0].suspend()

    suspended.append(Fiber(pool, wait, ThreadModes()))
    for fiber in (suspended[0], done):
        fiber.resume()
    assert num_workers() == before + 2
    pool.close()
    suspended[0].resume()  # its thread was busy when the pool was closed
    del done, pool
    _await(lambda: num_workers() == before)
    forgotten = FiberPool()
    Fiber(forgotten, lambda: None, ThreadModes()).resume()
    assert num_workers() == before + 1
    del forgotten
    _await(lambda: num_workers() == before)


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        gc.collect()
        time.sleep(0.01)
