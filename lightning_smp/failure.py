"""One rank's failure made known to all: its message, and an end for those who would wait.

Note: how a failure spreads. A rank that fails writes its error to the store and waits shortly until
the others have seen it, because the store may end with it. The others fail by themselves when a
connection to it breaks; who is blocked in a receive from a healthy rank, which nothing can
interrupt, is ended by its watching thread after a grace period. A rank that dies without a word is
known by its silence: every watching thread counts up a number in the store. Losing the store is a
failure too, unless its host has said good-bye. Ranks that wait for each other for ever, or for one
that has ended its script, are found by the watching threads as well: see `roll_call`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from lightning_smp.calls import Call, Calls, is_loss
from lightning_smp.failure_board import ANSWER_S, Board
from lightning_smp.reunion import WhyMissing
from lightning_smp.roll_call import STUCK, RollCall
from lightning_smp.topology import Topology

__all__ = ["FailureWatch", "ended_script"]

_POLL_S: Final = 0.25
_HEARD_S: Final = 5.0  # a failed rank waits so long for the others to see its message
_SILENCE_S: Final = 1.5  # six missed beats
_GRACE_S: Final = 3.0  # time to fail by oneself after another rank's failure
_STUCK_GRACE_S: Final = 1.0  # the same for a rank that waits for ever, which will not
_LATE_S: Final = 10.0  # who has not met an error so long after another rank never will
_OWN_GRACE_S: Final = 60.0  # time for callbacks and loggers after one's own failure
_EXIT_CODE: Final = 70
_HOST: Final = 0  # holds the store, unless the launcher does


class FailureWatch:
    """Watches the store for another rank's failure, in a thread of its own.

    Every rank makes one at the same point of the program, after the default process group; the
    runs of a process are told apart by how many watches it has made.

    Args:
        rank: this rank.
        calls: its calls, which are counted from here on.
        topology: the grid of all ranks.

    Attributes:
        error: this rank's own, in words, once it is reported, were it after the end of the run.
    """

    def __init__(self, rank: int, calls: Calls, topology: Topology) -> None:
        self._rank = rank
        self._others = [r for r in range(topology.size) if r != rank]
        store = dist.distributed_c10d._get_default_store()
        run = store.add(f"lightning_smp/runs/{rank}", 1)
        self._board = Board(store, run)
        self._own = Board(store, run)  # the thread's, since a call of it may hang
        calls.restart()
        self._calls = calls
        self._roll = RollCall(rank, calls, topology, self._own)
        calls.explain = self._explain
        self._stop = threading.Event()
        self._reported_s: float | None = None
        self.error: str | None = None
        self._has_heard = False
        self._seen: str | None = None  # by the thread; the store may end right after
        threading.Thread(target=self._watch, name="smp-watch", daemon=True).start()

    def report(self, error: BaseException, stage: int, position: str) -> None:
        """Makes this rank's error known; the first one of all ranks counts.

        Adds notes to the error and writes them to stderr: where it happened and, if it is about a
        lost connection, which rank failed first or is silent. Takes a few seconds at most.
        Who ends the script by `sys.exit` has not failed, but it leaves.
        """
        if isinstance(error, SystemExit):
            self.close(ended_script(error))
        what = f"{type(error).__name__}: {error}"
        self.error = self.error or what
        if self._reported_s is not None or self._stop.is_set():
            return
        self._reported_s = time.monotonic()
        where = f"on rank {self._rank} (stage {stage}{', ' + position if position else ''})"
        _add_note(error, where)
        found: list[str] = []
        _bounded(lambda: found.extend(self._tell(where, what, is_loss=is_loss(error))))
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

    def close(self, end: str) -> None:
        """Stops watching.

        Args:
            end: how this rank came to its end, for those who wait for it.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        _bounded(lambda: self._board.leave(self._rank, end, self._calls.where()))
        atexit.register(self._say_goodbye)

    def retire(self) -> None:
        """Another run begins, whose watch will say how the script ends. For one that is closed."""
        atexit.unregister(self._say_goodbye)

    def why_missing(self, *, in_run: bool) -> WhyMissing:
        """Tells, of ranks that do not come to a reunion, why they never will.

        Args:
            in_run: whether this run goes on, so that who has left it will not come, nor who is in a
                call for long; else another run is to begin.
        """
        seen: dict[int, tuple[int, float]] = {}

        def why(ranks: list[int], waited_s: float) -> str | None:
            for rank in ranks:
                if self._board.has_ended_script(rank):
                    return f"rank {rank} {ended_script()}"
                if (end := self._board.end_of(rank)) is not None:
                    if in_run:
                        return f"rank {rank} {end[0]}"
                    continue
                beats = self._board.beats([rank])[rank]
                if seen.setdefault(rank, (beats, waited_s))[0] != beats:
                    seen[rank] = (beats, waited_s)
                elif waited_s - seen[rank][1] > 2 * _SILENCE_S:
                    first = self._board.failure()
                    after = "" if first is None else f" after the first failure, {first}"
                    return f"rank {rank} gives no sign of life{after}"
            if in_run and waited_s > _LATE_S:
                for rank, sheet in self._board.sheets(ranks).items():
                    if sheet.open:
                        return f"rank {rank} is in {sheet}"
            return None

        return why

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
            else:
                self._hear(self._board)
                if not first.endswith(what):  # or all ranks refuse the same
                    found.append(f"the first failure was {first}")
            return found + (self._roll.others(self._board) if is_loss and not found else [])
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
            self._board.end_script(self._rank)
            if self._rank != _HOST or self._reported_s is not None:
                return
            self._board.end_store()
            self._await(lambda: not any(map(self._board.needs_store, self._others)), _HEARD_S)

    def _explain(self, call: Call) -> str | None:
        """Why a call lost its connection, if other ranks did not fail but went elsewhere."""
        failure = self._seen or self.first_failure()
        if failure is not None:
            return failure if failure.startswith(STUCK) else None
        return self._roll.why_lost(call, self._board)

    def _await(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 5)

    # ---- the watching thread ----------------------------------------------------------------

    def _watch(self) -> None:
        has_store, is_released = True, False
        failure = None
        while failure is None:
            if self._stop.wait(_POLL_S):
                return
            if not has_store:
                failure = self._seen = self._roll.beat_alone()
                continue
            try:
                failure = self._seen = self._look()
                if not is_released and self._own.store_ends():
                    self._roll.note_end(_HOST)
                    self._own.release(self._rank)
                    is_released = True
            except RuntimeError as error:
                has_store = False
                if not is_released:
                    # Who cannot see another rank's failure must not wait for it.
                    failure = f"the loss of rank {_HOST} or the launcher: {_first_line(error)}"
        self._end(failure)

    def _look(self) -> str | None:
        """Gives a sign of life; returns the first failure, which may be found here."""
        self._own.beat(self._rank)
        failure = self._own.failure()
        if failure is None and (stuck := self._roll.beat()) is not None:
            failure = self._own.post(stuck)
        return failure

    def _hear(self, board: Board) -> None:
        """Lets the rank that failed first know that this one has its message."""
        if not self._has_heard:
            self._has_heard = True
            board.hear()

    def _end(self, failure: str) -> None:
        seen_s = time.monotonic()
        with suppress(RuntimeError):
            self._hear(self._own)
        grace_s = _STUCK_GRACE_S if failure.startswith(STUCK) else _GRACE_S
        has_store = True
        while not self._stop.wait(_POLL_S):
            try:
                if has_store:
                    self._own.beat(self._rank)
            except RuntimeError:
                has_store = False
            own_s = self._reported_s
            limit_s = seen_s + grace_s if own_s is None else own_s + _OWN_GRACE_S
            if time.monotonic() < limit_s:
                continue
            sys.stderr.write(
                f"[lightning_smp] rank {self._rank} is ended; the first failure was {failure}\n"
            )
            sys.stderr.flush()
            os._exit(_EXIT_CODE)


def ended_script(end: SystemExit | None = None) -> str:
    """How a rank came to its end whose script ended without an error.

    Args:
        end: by which it ended, if it did.
    """
    code = 0 if end is None or end.code is None else end.code
    return f"ended its script (exit code {code if isinstance(code, int) else 1})"


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
    helper.join(ANSWER_S)
