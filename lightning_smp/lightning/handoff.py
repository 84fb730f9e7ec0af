"""Gradients that were made inside the step, handed to Lightning's own order of hooks.

Lightning calls the step, then ``zero_grad``, then ``backward`` on the loss that the step returned.
So the step's gradients are put aside, and the returned loss carries a node whose backward installs
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["GradientStash", "KnownGradient", "hand_off"]


class GradientStash:
    """Keeps the gradients of one step apart from those that were there before.

    Args:
        parameters: the parameters that are real on this rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._before = [(p, p.grad) for p in parameters if p.requires_grad]
        for parameter, _ in self._before:
            parameter.grad = None
        self.new: list[tuple[nn.Parameter, torch.Tensor]] = []

    def close(self) -> None:
        """The step is over: keeps its gradients, puts the former ones back."""
        self.new = [(p, p.grad) for p, _ in self._before if p.grad is not None]
        self.restore()

    def restore(self) -> None:
        """Puts the former gradients back."""
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    def install(self, factor: float) -> None:
        """Adds the step's gradients, times ``factor``, to the parameters' gradients."""
        for parameter, gradient in self.new:
            scaled = gradient if factor == 1.0 else gradient.mul_(factor)
            if parameter.grad is None:
                parameter.grad = scaled
            else:
                parameter.grad.add_(scaled)
        self.new = []


class _HandOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Any, loss: Any, install: Any) -> Any:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.install(gradients[0])
        return None, None, None


def hand_off(loss: torch.Tensor, install: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The loss, with a backward that calls ``install`` with the gradient it is given."""
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        return _HandOff.apply(anchor, loss.detach(), install)  # type: ignore[no-any-return]


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
