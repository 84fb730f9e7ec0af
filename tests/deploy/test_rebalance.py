"""Units that move between steps: nothing changes but the time that a step takes."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SMPStrategy
from tests.support.launch import run_ranks

_WIDTH, _STEPS = 6, 8


class Layer(nn.Module):
    """A unit that takes a known time, forward and backward, which no estimate knows."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(_WIDTH, dtype=torch.float64)
        self.register_buffer("calls_seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self._times = torch.tensor([forward_s, backward_s])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.calls_seen += 1
        time.sleep(float(self._times[0]))
        y = torch.tanh(self.linear(self.norm(x))) * (1 + 0.01 * self.calls)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(float(self._times[1])))
        return x + y


class Model(pl.LightningModule):
    def __init__(self, seconds: list[tuple[float, float]], optimizer: str, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(*pair) for pair in seconds)
        self.enter = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64)
        self.head = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64)
        if tied:
            self.head.weight = self.enter.weight
        self.optimizer = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = self.enter(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = (self.head(x) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), 0.01)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def _fit(model: Model, *, world: int = 1, smp: dict[str, Any] | None = None) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=SMPStrategy(**smp) if smp else "auto", accelerator="cpu", devices=world,
        max_steps=_STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(_data(), batch_size=8))
    return trainer


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8 * _STEPS, _WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(*x)


def _rebalanced(rank: int, world: int) -> Any:
    seconds = [(0.002, 0.004)] * 5 + [(0.012, 0.024)]
    found = {}
    for optimizer, tied in (("sgd", False),):
        model = Model(seconds, optimizer, tied)
        identities = [id(p) for p in model.parameters()]
        smp = {"pipeline_parallel_degree": 2, "microbatches": 4, "rebalance_after_steps": 4}
        trainer = _fit(model, world=world, smp=smp)
        assert identities == [id(p) for p in model.parameters()]
        result = trainer.strategy.rebalanced
        found[optimizer, tied] = (str(result), result, model.losses)
    return found


def test_try() -> None:
    for r in run_ranks(_rebalanced, 2):
        for v in r.values():
            print(v)
