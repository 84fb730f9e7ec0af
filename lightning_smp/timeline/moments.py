"""Moments of one rank: clock readings on a CPU, events on a GPU that are read later."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Moments"]


class Moments:
    """Takes moments and tells the time between them.

    On a GPU a moment is an event on the stream that the work is on: nothing is synchronised when it
    is taken, and the device must have passed it before it is read.

    Args:
        device: the run's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """This moment."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two moments."""
        if not self._on_gpu:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3
