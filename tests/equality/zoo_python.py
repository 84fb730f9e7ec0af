"""Steps that are ordinary Python: branches, scalar reads, data-dependent shapes, attributes."""

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

__all__ = ["CASES"]

Batch = tuple[Tensor, Tensor]


class Chain(Trainable):
    """Four blocks and a head, for steps that use them in their own way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, NUM_CLASSES]."""
        for layer in self.blocks:
            x = layer(x)
        return self.head(x)


class BranchOnStep(Chain):
    """Skips a block in odd steps, repeats one in later steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[0](x)
        if self.global_step % 2 == 0:
            h = self.blocks[1](h)
        for _ in range(1 + self.global_step // 2):
            h = self.blocks[2](h)
        return as_loss(self.head(self.blocks[3](h)), y)


class BranchOnLoss(Chain):
    """Takes another way when the loss is large."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = as_loss(self(x), y)
        if loss.item() > 1.4:
            return loss + 0.1 * self.blocks[0](x).pow(2).mean()
        return 0.5 * loss


class BranchOnValue(Chain):
    """Uses bool() of a comparison and tolist() of predictions."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        if h.mean() > 0:
            h = self.blocks[2](h)
        logits = self.head(self.blocks[3](h))
        right = sum(
            int(p == t) for p, t in zip(logits.argmax(-1).tolist(), y.tolist(), strict=True)
        )
        return as_loss(logits, y) * (1 + right)


class TensorOfLoss(Chain):
    """Builds a new tensor from a computed value, with torch.tensor and with new_tensor."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = as_loss(self(x), y)
        constant = torch.tensor([loss.detach()], dtype=torch.float64)
        other = loss.new_tensor([2.0, float(loss)])
        return loss * constant.sum() + 0.1 * loss * other.sum()


class MaskedSelection(Chain):
    """Indexes with a mask from the batch: the count is data, but every rank has it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        mask = y > 0
        h = self.blocks[1](self.blocks[0](x))
        chosen = self.blocks[2](h[mask])
        picked = self.head(self.blocks[3](chosen))
        return F.cross_entropy(picked, y[mask], reduction="sum") / y.numel()


class ComputedSelection(Chain):
    """Indexes with a mask that the model computed, and with nonzero of it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        positive = self.blocks[2](h)[h > 0]
        rows = (h.sum(dim=1) > 0).nonzero().squeeze(-1)
        logits = self.head(self.blocks[3](h[rows]))
        total = F.cross_entropy(logits, y[rows], reduction="sum")
        return (total + 0.1 * positive.pow(2).sum()) / y.numel()


class StoredAttribute(Chain):
    """Stores a value on itself and reads it after other modules ran."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the hidden state and keep a skip for ``decode``."""
        h = self.blocks[0](x)
        self.skip = h
        return self.blocks[1](h)

    def decode(self, h: Tensor) -> Tensor:
        """Return logits from h and the skip kept by ``encode``."""
        return self.head(self.blocks[3](self.blocks[2](h)) + self.skip)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return as_loss(self.decode(self.encode(x)), y)


class Holder(nn.Module):
    """A container that keeps its first half's result as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([block(), block()]),
            nn.ModuleList([block(), block()]),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the second half's result plus the first half's."""
        for layer in self.first:
            x = layer(x)
        self.kept = x
        for layer in self.second:
            x = layer(x)
        return x + self.kept


class StoredInContainer(Trainable):
    """A container stores a value on itself between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return as_loss(self.head(self.holder(x)), y)


class WeightPenalty(Chain):
    """L2 and L1 penalties over all parameters, written in the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        squares = sum(p.pow(2).sum() for p in self.parameters())
        absolute = sum(p.abs().sum() for n, p in self.named_parameters() if "weight" in n)
        return as_loss(self(x), y) + 1e-2 * squares + 1e-3 * absolute


class Questions(Chain):
    """Asks tensors the questions that library code asks, and computes with the answers."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.blocks[1](self.blocks[0](x))
        assert isinstance(h, torch.Tensor)
        assert (h.requires_grad, h.is_leaf, h.dtype) == (True, False, torch.float64)
        assert (h.device, h.ndim, h.dim()) == (x.device, 2, 2)
        assert repr(h)
        assert h.grad_fn is not None
        scale = len(h) / h.shape[0] + h.numel() / h.size(0) / h.size(-1)
        rows = [self.blocks[2](row) for row in h]
        h = torch.stack(rows) * scale
        first, *rest = h.unbind(dim=1)
        h = torch.stack([*rest, first], dim=1)
        return as_loss(self.head(self.blocks[3](h)), y)


CASES: tuple[Case, ...] = (
    case("branch_on_step", BranchOnStep, points, steps=4),
    case("branch_on_loss", BranchOnLoss, points, needs_same_split=True),
    case("branch_on_value", BranchOnValue, points, needs_same_split=True),
    case("tensor_of_loss", TensorOfLoss, points, needs_same_split=True),
    case("masked_selection", MaskedSelection, points),
    case("computed_selection", ComputedSelection, points),
    case("stored_attribute", StoredAttribute, points),
    case("stored_in_container", StoredInContainer, points),
    case("weight_penalty", WeightPenalty, points),
    case("questions", Questions, points),
)
