"""Reducers of a deployment: kept from step to step, and at work while the backward runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_smp.weights.gradients import GradientReducer

if TYPE_CHECKING:
    from lightning_smp.deploy.deployment import Deployment

__all__ = ["EarlyReducer", "KeptReducer"]


class KeptReducer:
    """The reducer of a deployment's gradients, which costs the host too much to make in every step.

    It is made anew when units have moved, when parameters were frozen or thawed, and when the step
    before has failed half way.
    """

    def __init__(self) -> None:
        self._reducer: GradientReducer | None = None
        self._made_for: tuple[object, list[bool]] | None = None

    def of(self, deployment: Deployment) -> GradientReducer:
        """The reducer for a step that is about to run, on a model that is ready."""
        parameters = deployment.ownership.parameters()
        made_for = (deployment.sharing, [parameter.requires_grad for parameter in parameters])
        if self._reducer is None or self._reducer.is_active or self._made_for != made_for:
            self._reducer, self._made_for = deployment.reducer(), made_for
        return self._reducer


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
