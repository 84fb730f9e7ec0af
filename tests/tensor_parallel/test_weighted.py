"""A rank whose own samples count nothing still passes on what it computed for the others."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_smp import SMPStrategy, tensor_parallelism
from tests.support.launch import run_ranks

BATCH, STEPS = 4, 3


class Masked(pl.LightningModule):
    """The mean over the samples whose mask is 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with tensor_parallelism():
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, _: int) -> dict[str, Tensor]:
        x, mask = batch
        count = mask.sum()
        losses = self.net(x).square().mean(1)
        return {"loss": (losses * mask).sum() / count.clamp(min=1), "loss_weight": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * BATCH * STEPS, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(len(x), dtype=torch.float64)
    mask[1 : 2 * BATCH : 2] = 0.0  # all that rank 1 has in the first step
    mask[2 * BATCH : 2 * BATCH + 3] = 0.0
    return TensorDataset(x, mask)


def fit(strategy: Any, devices: int, batch_size: int, sampler: Any = None) -> dict[str, Tensor]:
    model = Masked().double()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data(), batch_size=batch_size, sampler=sampler))
    return {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


def train(rank: int, world_size: int) -> dict[str, Tensor]:
    sampler = DistributedSampler(data(), world_size, rank, shuffle=False)
    return fit(SMPStrategy(tensor_parallel_degree=2), world_size, BATCH, sampler)


def test_weights_of_zero_on_one_rank_of_a_tensor_group() -> None:
    expected = fit("auto", 1, 2 * BATCH)
    weights = run_ranks(train, 2, timeout=100)[0]
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-10, atol=1e-12)
