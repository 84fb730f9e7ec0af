"""One rank's failure made known to all: its message, and an end for those who would wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

__all__ = ["FailureWatch"]

_KEY = "lightning_smp/failure"
_POLL_S = 0.25
_GRACE_S = 5.0
_EXIT_CODE = 70


class FailureWatch:
    """Watches the store for another rank's failure.

    A rank that fails writes its error there. The others, which may be blocked in a receive that
    nothing can interrupt, are ended after a grace period if they have not ended by themselves.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._store.set_timeout(timedelta(seconds=5))
        self._stop = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._watch, name="smp-watch", daemon=True)
        self._thread.start()

    def report(self, error: BaseException, stage: int, position: str) -> None:
        """Makes this rank's error known; the first one counts."""
        self._reported = True
        text = f"rank {self._rank} (stage {stage}{', ' + position if position else ''}): "
        text += f"{type(error).__name__}: {error}"
        try:
            known = self._store.compare_set(_KEY, "", text).decode()
        except RuntimeError:  # the store's host is gone: all ranks are ending
            return
        if known != text:
            sys.stderr.write(f"[lightning_smp] the first failure was on {known}\n")

    def first_failure(self) -> str | None:
        """The first error of any rank, or None."""
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except RuntimeError:
            return None

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            failure = self.first_failure()
            if failure is None:
                continue
            if self._reported:
                return
            time.sleep(_GRACE_S)
            if self._stop.is_set() or self._reported:
                return
            sys.stderr.write(
                f"[lightning_smp] rank {self._rank} stops, since another one failed: {failure}\n"
            )
            sys.stderr.flush()
            os._exit(_EXIT_CODE)
