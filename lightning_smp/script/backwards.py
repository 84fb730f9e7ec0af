"""Where the backwards of a step start: what `model.backward` was called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import SMPError, UnsupportedError
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.process_state import state

__all__ = ["Backwards"]


class Backwards:
    """Notes the losses of a step's microbatches; the engine runs their backwards later.

    Args:
        deployment: the model over the ranks.
        factor: of every gradient.

    Attributes:
        roots: with one stage, the losses of the microbatch that runs, with their gradients.
        noted: whether any backward was asked for.
    """

    def __init__(self, deployment: Deployment, factor: float) -> None:
        self._runtime = deployment.runtime
        self._factor = factor
        self.roots: list[tuple[Any, Tensor]] = []
        self.noted = False

    def note(self, tensors: Any, grad_tensors: Any = None) -> None:
        """One call of ``model.backward``."""
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None or isinstance(grad_tensors, Tensor):
            gradients: list[Any] = [grad_tensors] * len(losses)
        else:
            gradients = list(grad_tensors)
        if len(gradients) != len(losses):
            raise RuntimeError(
                f"got {len(losses)} tensors and {len(gradients)} gradients; give as many of both"
            )
        for loss, gradient in zip(losses, gradients, strict=True):
            self._note_one(loss, gradient)
        self.noted |= bool(losses)
        if state.optimizer is not None:
            state.optimizer.scale_backward()

    def _note_one(self, loss: Tensor, gradient: Tensor | None) -> None:
        if gradient is None and loss.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if not loss.requires_grad:
            raise RuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn"
            )
        if self._runtime is None:
            self.roots.append((get_gradient_edge(loss), self._seed(loss, gradient)))
            return
        if type(loss) is not PlacedTensor:
            raise SMPError(
                f"model.backward was given a tensor of shape {tuple(loss.shape)} that does not "
                "depend on the distributed model's output. Compute the loss from what the model "
                "returns."
            )
        run = self._runtime.active_run()
        home = max(loss._value.home, 0)
        seed = None
        if home == run.rank:
            assert loss._value.local is not None
            seed = self._seed(loss._value.local, _local(gradient, home))
        elif gradient is not None:
            _local(gradient, home)
        run.add_loss(loss, seed)

    def _seed(self, loss: Tensor, gradient: Tensor | None) -> Tensor:
        with torch.no_grad():
            if gradient is None:
                return torch.full_like(loss, self._factor)
            return gradient.detach() * self._factor


def _local(gradient: Tensor | None, home: int) -> Tensor | None:
    """The gradient of a loss on its home; refused on every rank where it is not there."""
    if type(gradient) is not PlacedTensor:
        return gradient
    value = gradient._value
    if not value.is_current_on(home):
        raise UnsupportedError(
            f"model.backward was given grad_tensors of stage {value.home} for a tensor of stage "
            f"{home}. Compute them from the tensor itself, or from the step's arguments."
        )
    return value.local
