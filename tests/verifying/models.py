"""Modules that are verified: a right one, and one that computes something else on one rank."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Faulty", "FaultyBackward", "Network", "batches"]


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Network(pl.LightningModule):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class _Off(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.001 if os.environ.get("RANK") == "1" else 1.0)


class Faulty(Network):
    """Its third block is off where rank 1 runs it."""

    def __init__(self) -> None:
        super().__init__()
        block = _Off()
        block.load_state_dict(self.blocks[2].state_dict())
        self.blocks[2] = block


class _OffBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1.001 if os.environ.get("RANK") == "1" else 1.0)


class _OffBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return _OffBackward.apply(super().forward(x))  # type: ignore[no-any-return]


class FaultyBackward(Network):
    """The gradient of its third block is off where rank 1 runs it."""

    def __init__(self) -> None:
        super().__init__()
        block = _OffBlock()
        block.load_state_dict(self.blocks[2].state_dict())
        self.blocks[2] = block


def batches() -> Any:
    """Shuffled samples."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    )
    return DataLoader(data, batch_size=8, shuffle=True)
