"""How many microbatches' activations a stage holds at once, in the first step as in later ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SMPStrategy
from tests.support.launch import run_ranks

_MICROBATCHES, _STEPS = 6, 3


class _Kept(torch.autograd.Function):
    """Counts forwards whose backward has not come yet."""

    alive = 0
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):  # of the analysis
            _Kept.alive += 1
            _Kept.most = max(_Kept.most, _Kept.alive)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if not isinstance(gradient, FakeTensor):
            _Kept.alive -= 1
        return gradient


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Kept.apply(torch.tanh(self.linear(x)))


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.most: list[int] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        assert _Kept.alive == 0
        self.most.append(_Kept.most)
        _Kept.most = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _train(rank: int, world_size: int) -> list[int]:
    model = _Model()
    trainer = pl.Trainer(
        strategy=SMPStrategy(pipeline_parallel_degree=2, microbatches=_MICROBATCHES),
        accelerator="cpu", devices=2, max_steps=_STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = TensorDataset(torch.randn(_STEPS * _MICROBATCHES, 4))
    trainer.fit(model, DataLoader(rows, batch_size=_MICROBATCHES))
    return model.most


def test_no_step_holds_all_microbatches() -> None:
    first, last = run_ranks(_train, 2)
    assert last == [1] * _STEPS
    assert first[0] == 1  # recorded: one after the other
    assert all(1 <= most <= 2 for most in first[1:])  # 1F1B over two stages
