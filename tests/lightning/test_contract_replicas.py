"""Two replicas of two stages: samplers, seeds, collectives and metrics over the right groups."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning.contract import Bench, Layout, Model, Results, assert_close, points, weights

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Observer(pl.Callback):
    """Records metrics at the end of every epoch, and the weights at the end."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        values = trainer.callback_metrics
        self.metrics.append({name: float(value) for name, value in sorted(values.items())})

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights = weights(trainer)


class Logs(Model):
    """Everything that is reduced over replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", logits.sum(), reduce_fx="sum", on_epoch=True, on_step=False, sync_dist=True)
        self.log("max", logits.max(), reduce_fx="max", on_epoch=True, on_step=False, sync_dist=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.total.update(logits.detach().sum())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("total", self.total.compute())
        self.total.reset()
        if self.current_epoch == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 5.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class SeesIndices(Model):
    """Keeps the indices of its samples, and what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        self.drawn.append(float(torch.rand(())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        self.indices += index.tolist()
        return torch.nn.functional.cross_entropy(self(x), y)


class Indexed(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return *points()[index], index


class Asks(Model):
    """Uses the collectives that Lightning gives to users."""

    answers: dict[str, Any]

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        rank = self.trainer.global_rank
        mine = torch.tensor(float(rank))
        strategy.barrier("here")
        gathered = self.all_gather({"rank": mine, "pair": torch.full((2,), float(rank))})
        self.answers = {
            "ranks": (rank, self.trainer.world_size, self.trainer.is_global_zero),
            "mean": strategy.reduce(mine, reduce_op="mean"),
            "sum": strategy.reduce(mine, reduce_op="sum"),
            "max": strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.MAX),
            "plain": strategy.reduce(3.5),
            "integers": strategy.reduce(torch.tensor(rank // 2), reduce_op="sum"),
            "broadcast": strategy.broadcast({"rank": rank, "list": [1, "a", None], "t": mine}),
            "from_one": strategy.broadcast(rank, src=1),
            "gathered": gathered,
            "gathered_by_strategy": strategy.all_gather(mine),
            "any": strategy.reduce_boolean_decision(rank == 3, all=False),
            "all": strategy.reduce_boolean_decision(rank == 3),
            "every": strategy.reduce_boolean_decision(True),
        }


def training(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(
        callbacks=[observer, EarlyStopping("val_loss", patience=1)],
        max_epochs=6,
        gradient_clip_val=0.2,
        accumulate_grad_batches=3,
    )
    trainer.fit(Logs(), bench.loader(16), bench.loader(8))
    return observer.metrics, observer.weights, trainer.global_step, trainer.current_epoch


def uneven_training(bench: Bench) -> Any:
    """Batches of 3 samples a replica, in two microbatches."""
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], smp={"drop_last": False}, max_epochs=2)
    trainer.fit(Model(), bench.loader(24, batch_size=6))
    return observer.weights


class Weighted(Model):
    """A loss over the samples of the first two classes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        weight = (y < 2).sum()
        return {"loss": (losses * (y < 2)).sum() / weight.clamp(min=1), "loss_weight": weight}


def another_module(bench: Bench) -> Any:
    """A Trainer fits a module with weighted losses after one without."""
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer])
    trainer.fit(Model(), bench.loader(8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Weighted(), bench.loader(16))
    return observer.weights


def predictions(bench: Bench) -> Any:
    return bench.trainer().predict(Model(), DataLoader(points(14).tensors[0], 4 // bench.dp))


def sampling(bench: Bench) -> Any:
    pl.seed_everything(11, verbose=False)
    model = SeesIndices()
    trainer = bench.trainer(max_epochs=2, smp={"microbatches": 1})
    trainer.fit(model, DataLoader(Indexed(), 2, shuffle=True))
    return model.indices, model.drawn


def questions(bench: Bench) -> Any:
    model = Asks()
    bench.trainer().fit(model, bench.loader(8))
    return model.answers


LIKE_ONE_DEVICE = [training, uneven_training, another_module]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect([*LIKE_ONE_DEVICE, predictions, sampling, questions], Layout(dp=2))


@pytest.mark.parametrize("scenario", LIKE_ONE_DEVICE, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=2e-5, atol=2e-6)


def test_predictions_are_equal_in_a_replica_and_complete_over_replicas(results: Results) -> None:
    ranks = [torch.cat(found) for found in results.ranks(predictions)]
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[2], ranks[3])
    together = torch.stack([ranks[0], ranks[2]], 1).flatten(0, 1)  # samplers deal them out in turn
    assert_close(together, torch.cat(predictions(Bench())))


def test_replicas_share_the_samples_and_draw_their_own_numbers(results: Results) -> None:
    ranks = results.ranks(sampling)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    for epoch in (slice(0, 8), slice(8, 16)):
        assert sorted(ranks[0][0][epoch] + ranks[2][0][epoch]) == list(range(16))
    assert ranks[0][0][:8] != ranks[0][0][8:]
    assert ranks[0][1] != ranks[2][1]


def test_collectives_go_over_replicas_and_decisions_over_all_ranks(results: Results) -> None:
    for rank, answers in enumerate(results.ranks(questions)):
        pair = torch.tensor([float(rank % 2), float(rank % 2 + 2)])  # the two of this stage
        expected = {
            "ranks": (rank, 4, rank == 0),
            "mean": pair.mean(),
            "sum": pair.sum(),
            "max": pair.max(),
            "plain": 3.5,
            "integers": torch.tensor(1),
            "broadcast": {"rank": 0, "list": [1, "a", None], "t": torch.tensor(0.0)},
            "from_one": 1,
            "gathered": {"rank": pair, "pair": pair[:, None].expand(2, 2)},
            "gathered_by_strategy": pair,
            "any": True,
            "all": False,
            "every": True,
        }
        assert_close(answers, expected, f"rank {rank}")
