"""Loss scaling with tensor parallelism: an inf on one rank of a tensor group skips all of them."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_smp as smp
from lightning_smp import SMPStrategy
from tests.support.launch import run_ranks

_STEPS, _OVERFLOWS, _SCALE = 5, 2, 2.0**10
_SPLIT = "0.0.weight"
_SCALES = [_SCALE, _SCALE * 2, _SCALE, _SCALE, _SCALE * 2]  # grows every two steps


def _net() -> nn.Module:
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        body = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))
    return nn.Sequential(body, nn.ReLU(), nn.Linear(8, 4))


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.arange(8) % 4) for _ in range(_STEPS)]


class _Overflow:
    """Makes the gradient of the split weight inf in one step, on ranks where `here`."""

    def __init__(self, net: nn.Module, *, here: bool) -> None:
        self.step = 0
        weight = net.get_parameter(_SPLIT)
        if here and weight.numel() > 1:
            weight.register_hook(
                lambda g: torch.full_like(g, torch.inf) if self.step == _OVERFLOWS else g
            )


def _one_device(dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    net = _net().to(dtype)
    overflow = _Overflow(net, here=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=2)
    scales = []
    for overflow.step, (x, y) in enumerate(_batches()):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(x.to(dtype)), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, net.state_dict()


def _script_rank(rank: int, world_size: int, autocast: bool) -> Any:
    smp.init(
        {
            "partitions": world_size // 2, "tensor_parallel_degree": 2, "ddp": True,
            "microbatches": 2, "prescaled_batch": True,
        }
    )  # fmt: skip
    net = _net() if autocast else _net().double()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9))
    scaler = smp.amp.GradScaler(init_scale=_SCALE, growth_interval=2)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = F.cross_entropy(model(x).float() if autocast else model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    overflow, scales = None, []
    for step, (x, y) in enumerate(_batches()):
        if overflow is not None:
            overflow.step = step
        optimizer.zero_grad()
        train(x if autocast else x.double(), y)
        if overflow is None:  # the partition has happened
            overflow = _Overflow(model.get_module(), here=smp.tp_rank() == 1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, dict(model.state_dict())


@pytest.mark.parametrize(("world_size", "autocast"), [(2, True), (4, False)])
def test_a_script_takes_one_verdict(world_size: int, autocast: bool) -> None:
    scales, weights = _one_device(torch.float32 if autocast else torch.float64)
    assert scales == _SCALES
    for found in run_ranks(_script_rank, world_size, autocast):
        assert found[0] == scales
        for name, weight in weights.items():
            tolerance = 1e-2 if autocast else 1e-10
            torch.testing.assert_close(found[1][name], weight, rtol=tolerance, atol=tolerance)


def _half_rank(rank: int, world_size: int) -> Any:
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "fp16": True})
    model = smp.DistributedModel(_net())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.5), dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": _SCALE, "scale_window": 2},
    )  # fmt: skip
    overflow = _Overflow(model.get_module(), here=smp.tp_rank() == 1)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)  # type: ignore[operator]
        return loss

    verdicts = []
    for overflow.step, (x, y) in enumerate(_batches()):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.zero_grad()
        train(x, y)
        optimizer.step()
        same = [torch.equal(before[name], w) for name, w in model.state_dict().items()]
        assert all(same) == optimizer.overflow
        verdicts.append((optimizer.overflow, optimizer.loss_scale))
    return verdicts


def test_the_key_fp16_takes_one_verdict() -> None:
    found = run_ranks(_half_rank, 2)
    assert found[0] == found[1]
    assert [overflow for overflow, _ in found[0]] == [step == _OVERFLOWS for step in range(_STEPS)]
    assert found[0][_OVERFLOWS][1] == found[0][_OVERFLOWS - 1][1] / 2


class _Model(pl.LightningModule):
    def __init__(self, *, overflows: bool) -> None:
        super().__init__()
        self.net = _net()
        self.overflow = _Overflow(self.net, here=False)
        self.overflows = overflows
        self.scales: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.overflow = _Overflow(self.net, here=self.overflows)
        self.overflow.step = batch_idx

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


def _lightning_rank(rank: int, world_size: int) -> Any:
    x, y = (torch.cat(parts) for parts in zip(*_batches(), strict=True))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, world_size, rank, shuffle=False) if world_size > 1 else None
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=2)
    strategy = SMPStrategy(tensor_parallel_degree=2) if world_size > 1 else "auto"
    model = _Model(overflows=rank == world_size - 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = pl.Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False,
            plugins=MixedPrecision("16-mixed", "cpu", scaler), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=8 // world_size, sampler=sampler))
    return model.scales, dict(trainer.strategy.lightning_module_state_dict())


def test_lightning_takes_one_verdict() -> None:
    """16-mixed over a tensor group; only the second rank sees an inf."""
    scales, weights = _lightning_rank(0, 1)
    assert scales == _SCALES
    found = run_ranks(_lightning_rank, 2)
    assert [rank[0] for rank in found] == [scales, scales]
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=1e-2, atol=1e-2)
