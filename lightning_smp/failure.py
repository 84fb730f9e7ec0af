"""One rank's failure made known to all: its message, and an end for those who would wait.

Note: how a failure spreads. A rank that fails writes its error to the store and waits shortly until
the others have seen it, because the store may end with it. The others fail by themselves when a
connection to it breaks; who is blocked in a receive from a healthy rank, which nothing can
interrupt, is ended by its watching thread after a grace period. A rank that dies without a word is
known by its silence: every watching thread counts up a number in the store. Losing the store is a
failure too, unless its host has said good-bye.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lightning_smp.errors import SMPError

__all__ = ["FailureWatch"]

_POLL_S: Final = 0.25
_HEARD_S: Final = 5.0  # a failed rank waits so long for the others to see its message
_SILENCE_S: Final = 1.5  # six missed beats
_GRACE_S: Final = 3.0  # time to fail by oneself after another rank's failure
_OWN_GRACE_S: Final = 60.0  # time for callbacks and loggers after one's own failure
_STORE_S: Final = 6.0  # the store's host may be stopped: nothing waits longer for its answer
_EXIT_CODE: Final = 70
_HOST: Final = 0  # holds the store, unless the launcher does
# Messages of gloo, NCCL and the store: who has such an error has usually lost another rank.
_CONNECTION: Final = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe|socket timeout",
    re.IGNORECASE,
)


class FailureWatch:
    """Watches the store for another rank's failure, in a thread of its own.

    Every rank makes one at the same point of the program, after the default process group; the
    runs of a process are told apart by how many watches it has made.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._others = [r for r in range(dist.get_world_size()) if r != rank]
        store = dist.distributed_c10d._get_default_store()
        run = store.add(f"lightning_smp/runs/{rank}", 1)
        self._board = _Board(store, run)
        self._own = _Board(store, run)  # the thread's, since a call of it may hang
        self._stop = threading.Event()
        self._reported_s: float | None = None
        self._seen: str | None = None  # by the thread; the store may end right after
        threading.Thread(target=self._watch, name="smp-watch", daemon=True).start()

    def report(self, error: BaseException, stage: int, position: str) -> None:
        """Makes this rank's error known; the first one of all ranks counts.

        Adds notes to the error and writes them to stderr: where it happened and, if it is about a
        lost connection, which rank failed first or is silent. Takes a few seconds at most.
        """
        if self._reported_s is not None:
            return
        self._reported_s = time.monotonic()
        where = f"on rank {self._rank} (stage {stage}{', ' + position if position else ''})"
        _add_note(error, where)
        what = f"{type(error).__name__}: {error}"
        found: list[str] = []
        _bounded(lambda: found.extend(self._tell(where, what, is_loss=_is_loss(error))))
        lines = [f"failure {where}: {what}", *found]
        for note in found:
            _add_note(error, note)
        sys.stderr.write("".join(f"[lightning_smp] {line}\n" for line in lines))
        sys.stderr.flush()

    def first_failure(self) -> str | None:
        """The first error of any rank, or None."""
        try:
            return self._board.failure()
        except RuntimeError:  # the store is gone
            return None

    def close(self) -> None:
        """Stops watching."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._rank == _HOST and self._reported_s is None:
            atexit.register(self._say_goodbye)
        else:
            _bounded(lambda: self._board.leave(self._rank))

    # ---- the failing rank -------------------------------------------------------------------

    def _tell(self, where: str, what: str, *, is_loss: bool) -> list[str]:
        """Posts the failure, unless another one was first; returns what is to be said of others."""
        try:
            silent = self._silent() if is_loss else []
            found = []
            if silent:
                ranks = ", ".join(map(str, silent))
                found = [f"no sign of life from rank {ranks} in the last {_SILENCE_S} s"]
            first = self._board.post("; ".join([f"{where}: {what}", *found]))
            if first.startswith(where):
                self._await(lambda: self._board.heard() >= len(self._others), _HEARD_S)
            elif not first.endswith(what):  # or all ranks refuse the same
                found.append(f"the first failure was {first}")
            return found
        except RuntimeError as error:
            if self._seen is not None:
                return [f"the first failure was {self._seen}"]
            lost = f"the store of rank {_HOST} or the launcher is gone: {_first_line(error)}"
            return [lost] if is_loss else []

    def _silent(self) -> list[int]:
        """The ranks whose threads do not count any more; none if a failure explains it all."""
        before = self._board.beats(self._others)
        self._await(lambda: self._board.failure() is not None, _SILENCE_S)
        if self._board.failure() is not None:
            return []
        after = self._board.beats(self._others)
        return [r for r in self._others if before[r] == after[r] and not self._board.has_left(r)]

    def _say_goodbye(self) -> None:
        """The host's end, and the store's, is not a failure for those who still work."""
        with suppress(RuntimeError):  # there is no store any more
            self._board.leave(self._rank)
            self._await(lambda: all(map(self._board.has_left, self._others)), _HEARD_S)

    def _await(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 5)

    # ---- the watching thread ----------------------------------------------------------------

    def _watch(self) -> None:
        host_has_left = False
        failure = None
        while failure is None:
            if self._stop.wait(_POLL_S):
                return
            try:
                self._own.beat(self._rank)
                failure = self._seen = self._own.failure()
                if failure is None and not host_has_left and self._own.has_left(_HOST):
                    host_has_left = True
                    self._own.leave(self._rank)
            except RuntimeError as error:
                if host_has_left:
                    return
                # Who cannot see another rank's failure must not wait for it.
                failure = f"the loss of rank {_HOST} or the launcher: {_first_line(error)}"
        self._end(failure)

    def _end(self, failure: str) -> None:
        with suppress(RuntimeError):
            self._own.hear()
        seen_s = time.monotonic()
        while not self._stop.wait(_POLL_S):
            own_s = self._reported_s
            limit_s = seen_s + _GRACE_S if own_s is None else own_s + _OWN_GRACE_S
            if time.monotonic() < limit_s:
                continue
            sys.stderr.write(
                f"[lightning_smp] rank {self._rank} is ended; the first failure was {failure}\n"
            )
            sys.stderr.flush()
            os._exit(_EXIT_CODE)


class _Board:
    """What the ranks of one run write to the store for each other.

    Every method raises RuntimeError where the store is gone, and waits where its host is stopped.
    """

    def __init__(self, store: Any, run: int) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._prefix = f"lightning_smp/run{run}"

    def post(self, text: str) -> str:
        """Writes a failure, unless there is one; returns the first."""
        return str(self._store.compare_set(f"{self._prefix}/failure", "", text), "utf-8")

    def failure(self) -> str | None:
        """The first failure."""
        key = f"{self._prefix}/failure"
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None

    def hear(self) -> None:
        """Counts a rank that knows of the failure."""
        self._store.add(f"{self._prefix}/heard", 1)

    def heard(self) -> int:
        """How many other ranks know of the failure."""
        return int(self._store.add(f"{self._prefix}/heard", 0))

    def beat(self, rank: int) -> None:
        """A sign of life."""
        self._store.add(f"{self._prefix}/beat/{rank}", 1)

    def beats(self, ranks: list[int]) -> dict[int, int]:
        """How many signs of life each rank has given."""
        return {rank: self._store.add(f"{self._prefix}/beat/{rank}", 0) for rank in ranks}

    def leave(self, rank: int) -> None:
        """From now on the rank needs nothing from here."""
        self._store.set(f"{self._prefix}/left/{rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Whether the rank needs nothing more."""
        return bool(self._store.check([f"{self._prefix}/left/{rank}"]))


def _is_loss(error: BaseException) -> bool:
    """Whether an error may be the mere consequence of another rank's end."""
    if isinstance(error, SMPError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_CONNECTION.search(str(error)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _add_note(error: BaseException, note: str) -> None:
    """Adds a line to the error's traceback (shown from Python 3.11 on)."""
    notes = [*getattr(error, "__notes__", ())]
    if not any(known.startswith(note) for known in notes):
        error.__notes__ = [*notes, note]


def _bounded(function: Callable[[], object]) -> None:
    """Calls a function, and leaves it alone where it does not end in time."""
    helper = threading.Thread(target=function, name="smp-report", daemon=True)
    helper.start()
    helper.join(_STORE_S)
