"""What a step logs: every option gives on all ranks the numbers of one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.lightning.contract import Bench, Layout, Model, Results, assert_close, loader

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Recorded(Logger):
    """A logger that keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def name(self) -> str:
        return "recorded"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append("hyperparams")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self.lines.append((step, dict(sorted(values.items()))))


class Snapshots(pl.Callback):
    """Records the three views of the metrics after every batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _take(self, trainer: pl.Trainer) -> None:
        views = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append([{k: float(v) for k, v in sorted(view.items())} for view in views])

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take(trainer)


class LogsAll(Model):
    """Uses every option of `log` on values that are on a stage, on all stages, or no tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        size = batch[0].shape[0]
        spread = batch[0].abs().mean()
        self.log("plain", loss)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("weighted", spread, on_epoch=True, batch_size=size)
        self.log("number", 2.5 * batch_idx, on_epoch=True)
        self.log("nothing", 1.0, prog_bar=False, logger=False, on_epoch=False)
        self.log_dict({"a": loss * 2, "b": spread}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss)
        self.log("val_bar", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("val_synced", loss, sync_dist=True)
        self.log_dict({"val_a": loss + 1, "val_b": batch[0].std(correction=0).mean() * 0})

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.current_epoch))


class LogsReductions(Model):
    """`reduce_fx`: a sum, a maximum, a minimum, over microbatches, batches and replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        logits = self(batch[0])
        self.log("sum", logits.sum(), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.log("max", logits.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("min", logits.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        return loss


class LogsMetrics(Model):
    """torchmetrics in the step: as an object, by value, and in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.mean = torchmetrics.MeanMetric()
        self.many = torchmetrics.MetricCollection(
            [
                torchmetrics.classification.MulticlassRecall(3, average="micro"),
                torchmetrics.classification.MulticlassConfusionMatrix(3),
            ]
        )
        self.kept = torchmetrics.CatMetric()
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = torch.nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean.update(loss.detach())
        self.many.update(logits, batch[1])
        self.kept.update(logits.detach().amax(-1))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        values = self.many.compute()
        kept = self.kept.compute().sort().values
        self.epochs.append([*[values[name] for name in sorted(values)], kept])
        for metric in (self.mean, self.many, self.kept):
            metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", self.accuracy.compute())
        self.accuracy.reset()


class Watched(Model):
    """A validation loss that falls, then rises with the learning rate."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 4.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def _train(bench: Bench, model: Model, **options: Any) -> Any:
    logger, snapshots = Recorded(), Snapshots()
    trainer = bench.trainer(logger=logger, callbacks=[snapshots], max_epochs=2, **options)
    trainer.fit(model, loader(), loader(8))
    return logger.lines, snapshots.seen


def log_options(bench: Bench) -> Any:
    return _train(bench, LogsAll())


def log_every_two_batches(bench: Bench) -> Any:
    return _train(bench, LogsAll(), log_every_n_steps=2)


def log_reductions(bench: Bench) -> Any:
    return _train(bench, LogsReductions())


def log_metrics(bench: Bench) -> Any:
    model = LogsMetrics()
    return _train(bench, model), model.epochs


def csv_logger(bench: Bench) -> Any:
    """Only the first rank writes; what the file holds is what one device writes."""
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder, name="run", version=0)
        trainer = bench.trainer(logger=logger, max_epochs=2)
        trainer.fit(LogsAll(), loader(), loader(8))
        trainer.strategy.barrier()
        path = Path(folder) / "run" / "version_0" / "metrics.csv"
        if not trainer.is_global_zero:
            return path.exists()
        header, *rows = [line.split(",") for line in path.read_text().splitlines()]
        return [{name: float(v) for name, v in zip(header, row, strict=True) if v} for row in rows]


def early_stopping(bench: Bench) -> Any:
    stopping = EarlyStopping("val_loss", patience=1, min_delta=1e-3)
    trainer = bench.trainer(callbacks=[stopping], max_epochs=8)
    trainer.fit(Watched(), loader(), loader(8))
    return (
        trainer.current_epoch,
        trainer.global_step,
        stopping.stopped_epoch,
        float(stopping.best_score),
    )


def model_checkpoint(bench: Bench) -> Any:
    """Keeps the best two; all ranks agree on their names, and the files are there."""
    with tempfile.TemporaryDirectory() as folder:  # one for each rank: the first one's counts
        checkpoint = ModelCheckpoint(
            folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True
        )
        trainer = bench.trainer(enable_checkpointing=True, callbacks=[checkpoint], max_epochs=5)
        trainer.fit(Watched(), loader(), loader(8))
        used = Path(checkpoint.best_model_path).parent
        kept = {Path(path).name: float(v) for path, v in sorted(checkpoint.best_k_models.items())}
        files = sorted(path.name for path in used.iterdir())
        trainer.strategy.barrier()
        tested = trainer.validate(Watched(), loader(8), ckpt_path="best", verbose=False)
        trainer.strategy.barrier()
    return Path(checkpoint.best_model_path).name, kept, files, tested


SCENARIOS = [
    log_options,
    log_every_two_batches,
    log_reductions,
    log_metrics,
    early_stopping,
    model_checkpoint,
]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect([*SCENARIOS, csv_logger], Layout())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=2e-5, atol=1e-6)


def test_csv_logger_writes_once(results: Results) -> None:
    first, second = results.ranks(csv_logger)
    assert_close(first, csv_logger(Bench()), rtol=2e-5, atol=1e-6)
    assert second is False
