"""Autograd around modules: custom functions, checkpoints, hooks, auxiliary losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from tests.equality.case import (
    NUM_CLASSES,
    NUM_FEATURES,
    Case,
    Trainable,
    as_loss,
    block,
    case,
    points,
)
from tests.equality.zoo_python import Chain

__all__ = ["CASES"]

Batch = tuple[Tensor, Tensor]


class Reversal(torch.autograd.Function):
    """The identity, with a gradient of opposite sign and another size."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, strength: float) -> Tensor:
        """Return x."""
        ctx.strength = strength  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> tuple[Tensor, None]:
        """Return the reversed gradient."""
        return -ctx.strength * gradients[0], None  # type: ignore[attr-defined]


class CustomFunction(Chain):
    """A custom autograd Function between modules."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        domain = self.blocks[2](Reversal.apply(h, 0.3))
        return as_loss(self.head(self.blocks[3](h)), y) + domain.pow(2).mean()


class OuterCheckpoint(Chain):
    """torch.utils.checkpoint over several layers, called by the step."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def run(self, h: Tensor, first: int, last: int) -> Tensor:
        """Return h after the blocks from first to last."""
        for layer in self.blocks[first:last]:
            h = layer(h)
        return h

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = checkpoint(self.run, self.blocks[0](x), 1, 3, use_reentrant=self.use_reentrant)
        h = checkpoint(self.run, h, 3, 4, use_reentrant=self.use_reentrant)
        return as_loss(self.head(h), y)


class Hooked(Chain):
    """Forward hooks keep outputs of blocks in a list that the loss reads; one changes an output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for layer in (self.blocks[0], self.blocks[2]):
            layer.register_forward_hook(self.keep)
        self.blocks[3].register_forward_hook(lambda module, args, output: output * 1.5)

    def keep(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Append the block's output to the list."""
        self.seen.append(output)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.clear()
        loss = as_loss(self(x), y)
        return loss + 0.1 * sum(h.pow(2).mean() for h in self.seen)


class Router(nn.Module):
    """A mixture of experts that keeps its auxiliary loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(NUM_FEATURES, 3)
        self.experts = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the chosen expert's result for every row."""
        logits = self.gate(x)
        self.auxiliary_loss = logits.logsumexp(dim=-1).pow(2).mean()
        weight, choice = logits.softmax(dim=-1).max(dim=-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if rows.numel() > 0:
                result = result.index_add(0, rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return x + result


class Experts(Trainable):
    """Sums the routers' auxiliary losses in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(4))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, y = batch
        for layer in self.layers:
            h = layer(h)
        auxiliary = sum(layer.auxiliary_loss for layer in self.layers)
        self.log("auxiliary", auxiliary, sync_dist=True)
        return as_loss(self.head(h), y) + 0.01 * auxiliary


class Force(nn.Module):
    """Returns the gradient of an inner energy by its input: autograd inside of one module.

    Its parameters are its own, so that no partition can cut it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(NUM_FEATURES, NUM_FEATURES))
        self.readout = nn.Parameter(torch.randn(NUM_FEATURES))

    def energy(self, x: Tensor) -> Tensor:
        """Return an energy for every row of x [B, NUM_FEATURES]."""
        return torch.tanh(x @ self.weight) @ self.readout

    def forward(self, x: Tensor) -> Tensor:
        """Return -dE/dx [B, NUM_FEATURES]."""
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)
        return -gradient


class CompositeForce(Force):
    """The same, of submodules that a partition may put on different stages."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight, self.readout
        self.layers = nn.Sequential(block(), nn.Linear(NUM_FEATURES, 1))

    def energy(self, x: Tensor) -> Tensor:
        """Return an energy for every row of x [B, NUM_FEATURES]."""
        return self.layers(x)


class InnerGradient(Trainable):
    """A force field between ordinary blocks."""

    def __init__(self, force: type[Force]) -> None:
        super().__init__()
        self.enter, self.force, self.leave = block(), force(), block()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.enter(x)
        return as_loss(self.head(self.leave(h + self.force(h))), y)


class TensorHook(Chain):
    """A gradient hook on a value between modules, and a detached branch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        h.register_hook(lambda gradient: gradient * 0.5)
        target = self.blocks[2](h.detach())
        h = self.blocks[3](h)
        return as_loss(self.head(h), y) + (h - target.detach()).pow(2).mean() + target.pow(2).mean()


CASES: tuple[Case, ...] = (
    case("custom_function", CustomFunction, points),
    case("checkpoint_outer", lambda: OuterCheckpoint(use_reentrant=False), points),
    case("checkpoint_outer_reentrant", lambda: OuterCheckpoint(use_reentrant=True), points),
    case("hooks_keep_outputs", Hooked, points),
    case("experts_auxiliary_loss", Experts, points),
    case("inner_gradient", lambda: InnerGradient(Force), points),
    case(
        "inner_gradient_composite",
        lambda: InnerGradient(CompositeForce),
        points,
        may_be_refused=True,
    ),
    case("tensor_hook", TensorHook, points),
)
