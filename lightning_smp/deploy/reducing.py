"""Gradients reduced while the rest of the backward runs."""

from __future__ import annotations

from torch import nn

from lightning_smp.weights.gradients import GradientReducer

__all__ = ["EarlyReducer"]


class EarlyReducer:
    """Reduces while backward goes on; begins when the first gradient is final.

    Args:
        reducer: of this step.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._started = False

    def ready(self, parameters: list[nn.Parameter], weight: float | None) -> None:
        """The gradients of these parameters are final; ``weight`` as in the reducer's start."""
        if not self._started:
            self._reducer.start(weight)
            self._started = True
        for parameter in parameters:
            self._reducer.ready(parameter)

    def finish(self, weight: float | None) -> None:
        """Reduces what is left and waits."""
        self.ready([], weight)
        self._reducer.finish()
