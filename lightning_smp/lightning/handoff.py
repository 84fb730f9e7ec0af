"""Gradients that were made inside the step, handed to Lightning's own order of hooks.

Lightning calls the step, then ``zero_grad``, then ``backward`` on the loss that the step returned.
So the step's gradients are put aside, and the returned loss carries a node whose backward installs
them. Where nobody could tell the difference (foresight.py), there is only one set of gradients:
those before are dropped first if Lightning is about to drop them, or added to in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lightning_smp.errors import UnsupportedError

__all__ = [
    "ExpectedGradient",
    "GradientStash",
    "GradientSum",
    "KnownGradient",
    "StepGradients",
    "hand_off",
]


class StepGradients(Protocol):
    """Where the gradients of one step are, until Lightning's backward."""

    def close(self) -> None:
        """The step is over."""

    def restore(self) -> None:
        """The step has failed."""

    def install(self, factor: float) -> None:
        """Lightning's backward: the parameters' gradients get the step's, times ``factor``."""


class GradientStash:
    """Keeps the gradients of one step apart from those that were there before.

    Args:
        parameters: the parameters that are real on this rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._trained = [p for p in parameters if p.requires_grad]
        self._before = [(p, g) for p in self._trained if (g := p.grad) is not None]
        for parameter, _ in self._before:
            parameter.grad = None
        self._new: list[tuple[nn.Parameter, torch.Tensor]] = []

    def close(self) -> None:
        """Keeps the step's gradients, puts the former ones back."""
        self._new = [(p, g) for p in self._trained if (g := p.grad) is not None]
        self.restore()

    def restore(self) -> None:
        """Puts the former gradients back."""
        for parameter in self._trained:
            parameter.grad = None
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._trained, self._before = [], []

    def install(self, factor: float) -> None:
        """Adds the step's gradients, times ``factor``, to the parameters' gradients."""
        for parameter, gradient in self._new:
            scaled = gradient if factor == 1.0 else gradient.mul_(factor)
            if parameter.grad is None:
                parameter.grad = scaled
            else:
                parameter.grad.add_(scaled)
        self._new = []


class GradientSum:
    """Lets the step add to the gradients that are there, as plain accumulation does."""

    def close(self) -> None:
        """Nothing waits."""

    def restore(self) -> None:
        """What was added stays, as after a backward that fails."""

    def install(self, factor: float) -> None:
        """Makes sure that what was added needed no factor.

        Raises:
            UnsupportedError: it did.
        """
        if factor != 1.0:
            raise UnsupportedError(
                f"the loss of an accumulated batch was multiplied by {factor} between the step and "
                "its backward, where nothing of Lightning's does, after its gradients were added "
                "to those before. Change the loss in training_step, or in the hook "
                "on_before_backward."
            )


class _HandOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Any, loss: Any, install: Any) -> Any:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.install is None:
            raise UnsupportedError(
                "the loss that training_step returned got a second backward, but its gradients "
                "were made in the step, once. Multiply the loss instead, or keep its gradients."
            )
        install, ctx.install = ctx.install, None
        install(gradients[0])
        return None, None, None


def hand_off(loss: torch.Tensor, install: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The loss, with a backward that calls ``install`` with the gradient it is given."""
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        return _HandOff.apply(anchor, loss.detach(), install)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ExpectedGradient:
    """What a hand-off's gradient will be if nobody changes the loss; the step is run with it.

    Attributes:
        share: what Lightning multiplies the loss by.
        scale: what a gradient scaler does, a tensor on the device, which is not read without need.
        is_sure: whether nobody but the scaler can change the loss.
    """

    share: float
    scale: torch.Tensor | None = None
    is_sure: bool = False

    @property
    def seed(self) -> float | torch.Tensor:
        """The gradient itself."""
        return self.share if self.scale is None else self.scale * self.share

    def times(self, gradient: torch.Tensor, known: float | None) -> float:
        """How many times the expected gradient is the one that came.

        Args:
            gradient: what came.
            known: the same as far as the graph behind the scaler tells; None if it does not.
        """
        if known is not None and (self.scale is None or self.is_sure):
            ratio = known / self.share
        else:
            ratio = float(gradient) / float(self.seed)
        # The step's gradients began with a number of the same type, rounded in the same way.
        return 1.0 if abs(ratio - 1.0) <= torch.finfo(gradient.dtype).eps else ratio


class KnownGradient:
    """What a hand-off's gradient will be, where the graph behind it says so.

    Reading the gradient itself would wait for the device in every step. The loss that Lightning
    calls backward on is the one handed off, divided by the number of accumulated batches; whatever
    else is done to it, or to its graph, makes the gradient unknown.

    Args:
        loss: what backward is about to be called on, without a gradient of its own.
    """

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = loss
        self._node = loss.grad_fn
        self._source, self._value = self._node, 1.0
        if self._node is not None and self._node.name() == "DivBackward0":
            divisor = self._node._saved_other  # type: ignore[attr-defined]
            if divisor is not None and divisor.device.type == "cpu":
                self._source = self._node.next_functions[0][0]
                self._value = 1.0 / float(divisor.detach())

    def of(self, handed_off: torch.Tensor) -> float | None:
        """The gradient, or None if it has to be read."""
        is_untouched = self._loss.grad_fn is self._node and not self._loss._backward_hooks
        if not is_untouched or handed_off._backward_hooks:
            return None
        return self._value if self._source is handed_off.grad_fn else None
