"""Bounds the library's own collectives where the backend of their group does not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.native.backend import SMP, SMP_GLOO, Counters
from lightning_smp.native.switches import NO_LIMIT, throttle_limit

__all__ = ["Throttle", "throttle_for"]

_BUSY_POLLS: Final = 20
_SHORTEST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 200e-6


class Throttle:
    """At most `limit` collectives of one group in flight: the next waits for the oldest.

    Work of NCCL is polled, since waiting for it does not block the host; other work is waited for,
    since not all of it reports its end. For one thread.
    """

    def __init__(self, limit: int, *, polls: bool, timeout_s: float = 1800.0) -> None:
        """Makes the throttle of one group.

        Args:
            limit: at least 1.
            polls: whether `is_completed` of the works tells their end, and `wait` does not block.
            timeout_s: seconds that one collective may wait for room, if `polls`.
        """
        self._limit = limit
        self._polls = polls
        self._timeout_s = timeout_s
        self._works: deque[dist.Work] = deque()
        self._issued = self._waited = self._max_in_flight = 0
        self._waited_s = 0.0

    def issue(self, start: Callable[[], dist.Work | None]) -> dist.Work | None:
        """Call `start`, which issues a collective, when there is room; returns its work.

        Waiting for the work is up to the caller, as ever. Collective over the group.

        Raises:
            CommunicationError: an earlier collective did not end within the timeout.
        """
        self._issued += 1
        self._retire()
        if len(self._works) >= self._limit:
            started_s = time.perf_counter()
            self._end_oldest()
            self._waited += 1
            self._waited_s += time.perf_counter() - started_s
        work = start()
        if work is None:
            return None
        kept = work if self._polls else _OnceWork(work)
        self._works.append(kept)
        self._max_in_flight = max(self._max_in_flight, len(self._works))
        return kept

    def counters(self) -> Counters:
        """What was done so far."""
        return Counters(
            self._issued, self._waited, self._waited_s, len(self._works), self._max_in_flight
        )

    def _retire(self) -> None:
        while self._works and self._works[0].is_completed():
            self._works.popleft()

    def _end_oldest(self) -> None:
        work = self._works.popleft()
        if not self._polls:
            work.wait()
            return
        deadline_s = time.monotonic() + self._timeout_s
        polls, pause_s = 0, _SHORTEST_PAUSE_S
        while not work.is_completed():
            polls += 1
            if polls < _BUSY_POLLS:
                continue
            if time.monotonic() > deadline_s:
                raise CommunicationError(
                    f"a collective waited {self._timeout_s:.0f} s, the timeout of its group, for "
                    f"one of the {self._limit} before it (SMP_NCCL_THROTTLE_LIMIT). A rank has not "
                    f"issued that one, or is stuck: look at the other ranks' stacks."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _OnceWork(dist.Work):
    """Waits for another work at most once: gloo copies some results out at every wait."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work
        self._done = False

    def is_completed(self) -> bool:
        return self._done or self._work.is_completed()

    def wait(self, *timeout: object) -> bool:
        if not self._done:
            self._work.wait(*timeout)  # type: ignore[arg-type]
            self._done = True
        return True


def throttle_for(group: dist.ProcessGroup) -> Throttle | None:
    """Return a throttle for `group`; None where its backend has one, or there is no bound.

    Raises:
        ConfigError: SMP_NCCL_THROTTLE_LIMIT is no limit.
    """
    limit, backend = throttle_limit(), dist.get_backend(group)
    if limit == NO_LIMIT or backend in (SMP, SMP_GLOO):
        return None
    return Throttle(limit, polls=backend == "nccl")
