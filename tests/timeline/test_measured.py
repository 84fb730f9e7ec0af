"""Measured steps of two processes: the parts are where they were put, and add up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import ConfigError, SMPStrategy
from tests.support.launch import run_ranks

SLOW_S, FAST_S = 0.02, 0.005


class Sleeping(nn.Module):
    """A unit whose forward takes a known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.fast = Sleeping(FAST_S)
        self.slow = Sleeping(SLOW_S)
        self.walls: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.slow(self.fast(batch[0])).square().mean()

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def on_before_zero_grad(self, *_: Any) -> None:
        self.walls.append(time.perf_counter() - self._begun)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(rank: int, world_size: int, folder: str) -> None:
    import lightning_smp as smp

    strategy = SMPStrategy(
        pipeline_parallel_degree=2, microbatches=4, timeline_every_n_steps=2, auto_partition=False,
        default_partition=0,
    )  # fmt: skip
    model = Model()
    smp.set_partition(model.slow, 1)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=5, max_epochs=1,
        logger=CSVLogger(folder), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8))
    if rank == 0:
        (Path(folder) / "walls.json").write_text(json.dumps(model.walls))


def test_a_slow_stage_is_seen_as_imbalance(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), timeout=100)
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *rows = [line.split(",") for line in metrics.read_text().splitlines()]
    measured = [
        dict(zip(header, row, strict=True))
        for row in rows if dict(zip(header, row, strict=True))["smp/bubble"]
    ]  # fmt: skip
    assert len(measured) == 2  # steps 2 and 4
    walls = json.loads((tmp_path / "walls.json").read_text())
    for row, step in zip(measured, (2, 4), strict=True):
        numbers = {key: float(row[key]) for key in header if key.startswith("smp/")}
        idle = sum(value for key, value in numbers.items() if "/idle_" in key)
        assert idle == pytest.approx(numbers["smp/bubble"])
        assert numbers["smp/work_stage_1"] > 0.5 > numbers["smp/work_stage_0"]
        assert numbers["smp/idle_imbalance"] + numbers["smp/idle_warmup_drain"] > 0.2
        (trace,) = tmp_path.rglob(f"timelines/step_{step}.json")
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
        busy = sum(e["dur"] for e in events if e["tid"] == 1 and e["name"].startswith("F forward"))
        waits = sum(e["dur"] for e in events if e["tid"] == 1 and e["name"].startswith("wait"))
        assert 4 * SLOW_S * 1e6 <= busy <= walls[step] * 1e6
        assert busy + waits >= 4 * (SLOW_S + FAST_S / 4) * 1e6
        assert trace.with_suffix(".svg").exists()


def test_a_single_stage_has_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="single stage"):
        SMPStrategy(timeline_every_n_steps=10)
