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

__all__ = ["GradientStash", "hand_off"]


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
