"""In-place operations: on values that were sent, through views, in modules, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Fresh(nn.Module):
    """A block that saves nothing of its input, so that the input may change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for a copy of x."""
        return self.inner(x.clone())


class FreshChain(Trainable):
    """Blocks that allow their inputs to be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fresh() for _ in range(4))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)


class ChangedBetween(FreshChain):
    """y = b(h); h.mul_(3); z = b(h)."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[0](x) * 1.0
        before = self.blocks[1](h)
        h.mul_(3)
        after = self.blocks[1](h)
        h += after
        return as_loss(self.head(self.blocks[2](before) + self.blocks[3](h)), y)


class ChangedThroughView(FreshChain):
    """The same, but the change goes through a view, and the view is used too."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[0](x) * 1.0
        left = h[:, : NUM_FEATURES // 2]
        before = self.blocks[1](h)
        left.mul_(3)
        after = self.blocks[2](h)
        h[:, -1] = before[:, 0]
        return as_loss(self.head(self.blocks[3](h + after) + left.repeat(1, 2)), y)


class InplaceFirst(Trainable):
    """Units that start with ReLU(inplace=True), whose input is read again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.units = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(NUM_FEATURES, NUM_FEATURES))
            for _ in range(3)
        )
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.enter(x)
        for unit in self.units:
            h = unit(h) + h
        return as_loss(self.head(h), y)


class WriteIntoPlain(Chain):
    """Computed values written into tensors that the step made."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[0](x)
        out = torch.zeros(x.shape[0], 3, NUM_FEATURES, dtype=x.dtype, device=x.device)
        out[:, 1:] = h.unsqueeze(1)
        out[:, 0] = self.blocks[1](h)
        total = x.new_zeros(x.shape)
        for index in range(3):
            total.add_(self.blocks[2](out[:, index]))
        return as_loss(self.head(self.blocks[3](total)), y)


class RunningBuffer(Chain):
    """A buffer of the LightningModule that follows a computed mean and enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        self.mean.mul_(0.9).add_(h.detach().mean(dim=0), alpha=0.1)
        return as_loss(self.head(self.blocks[3](self.blocks[2](h - self.mean))), y)


class Doubling(nn.Module):
    """Changes its own input, as careless modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for x, which is doubled in place."""
        return self.inner(x.mul_(2))


class ReceivedChanged(Trainable):
    """Values that just arrived are changed in place: by outer code and by the next module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = block()
        self.units = nn.ModuleList(Doubling() for _ in range(3))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.first(x) + 0.5
        for unit in self.units:
            h = F.relu_(unit(h) * 1.0) * 1.0
            h += 1
        return as_loss(self.head(h), y)


class MaskWriter(nn.Module):
    """Writes into the mask that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the block's result where mask allows, and close the mask's first column."""
        result = self.inner(x) * mask.logical_not()
        mask[:, 0] = True
        return result


class MaskWritten(Trainable):
    """A plain mask changed inside one module is read by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MaskWriter(), MaskWriter()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        mask = torch.zeros_like(x, dtype=torch.bool)
        h = self.second(self.first(x, mask) + 1, mask) + 1
        return as_loss(self.head(h.masked_fill(mask, 0.0)), y)


class OutArguments(Chain):
    """Copies, index writes and zeroing of computed values."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x)) * 1.0
        kept = torch.empty_like(h).copy_(h)
        h.index_fill_(1, torch.tensor([0, 2], device=h.device), 0.5)
        kept.clamp_(min=-0.5).scatter_(1, y.unsqueeze(1), 0.0)
        deep = self.blocks[2](h)
        return as_loss(self.head(self.blocks[3](deep) + kept), y)


CASES: tuple[Case, ...] = (
    case("inplace_between_calls", ChangedBetween, points),
    case("inplace_through_view", ChangedThroughView, points, max_pp=2),
    case("inplace_relu_first", InplaceFirst, points),
    case("inplace_into_plain", WriteIntoPlain, points),
    case("inplace_running_buffer", RunningBuffer, points, needs_same_split=True, max_dp=1),
    case("inplace_received", ReceivedChanged, points),
    case("inplace_mask_argument", MaskWritten, points),
    case("inplace_index_writes", OutArguments, points),
)
