"""The loops: every entry point of the Trainer gives on all ranks what it gives on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.lightning.contract import Bench, Layout, Model, Results, loader, points, weights

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Observer(pl.Callback):
    """Records what the batch-end hooks are given, and the weights at the end of training."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(("train", outputs))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(("validate", outputs))

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(("test", outputs))

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(("predict", outputs))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = weights(trainer)


class Full(Model):
    """All steps, with a result of each kind."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return {"loss": loss, "scores": self(batch[0]), "name": "v", "index": batch_idx}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(-1)


class ReturnsDict(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "logits": self(batch[0]).detach(), "step": f"step {batch_idx}"}


class ReturnsNone(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)


class TwoLoaders(Full):
    """Evaluation steps with a loader index."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]) + dataloader_idx


def _fit(bench: Bench, model: Model, observer: Observer, **options: Any) -> pl.Trainer:
    trainer = bench.trainer(callbacks=[observer], **options)
    trainer.fit(model, loader())
    return trainer


def fit_with_validation(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(Full(), loader(), loader(8))
    return observer.seen, observer.weights, _metrics(trainer), trainer.global_step


def fit_returning_dict(bench: Bench) -> Any:
    observer = Observer()
    _fit(bench, ReturnsDict(), observer)
    return observer.seen, observer.weights


def validate(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer])
    return trainer.validate(Full(), loader(8), verbose=False), observer.seen


def test_loop(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer])
    return trainer.test(Full(), loader(8), verbose=False), observer.seen


test_loop.__test__ = False  # type: ignore[attr-defined]


def predict(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer])
    return trainer.predict(Full(), loader(8)), observer.seen


def predict_with_default_step(bench: Bench) -> Any:
    return bench.trainer().predict(Model(), torch.utils.data.DataLoader(points(8).tensors[0], 4))


def evaluation_with_short_batches(bench: Bench) -> Any:
    """The last batches have 3 samples, then 1: fewer than microbatches."""
    trainer = bench.trainer(smp={"microbatches": 4})
    model = Full()
    results = [trainer.validate(model, loader(11), verbose=False)]
    results += [trainer.test(model, loader(9), verbose=False)]
    return (
        results,
        trainer.predict(model, loader(5, batch_size=1)),
        trainer.predict(model, loader(7)),
    )


def several_loaders(bench: Bench) -> Any:
    trainer = bench.trainer()
    model = TwoLoaders()
    validated = trainer.validate(model, [loader(8), loader(4, batch_size=2)], verbose=False)
    return validated, trainer.predict(model, [loader(8), loader(4, batch_size=2)])


def fit_twice(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer])
    model = Full()
    trainer.fit(model, loader())
    first = dict(observer.weights)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    return first, observer.weights, observer.seen, trainer.global_step


def fit_then_test_and_predict(bench: Bench) -> Any:
    observer = Observer()
    model = Full()
    trainer = _fit(bench, model, observer)
    tested = trainer.test(model, loader(8), verbose=False)
    return tested, trainer.predict(model, loader(8)), observer.weights


def fit_then_another_trainer(bench: Bench) -> Any:
    observer = Observer()
    model = Full()
    _fit(bench, model, observer)
    other = bench.trainer()
    tested = other.test(model, loader(8), verbose=False)
    again = Observer()
    _fit(bench, model, again)
    return tested, observer.weights, again.weights


def test_then_fit(bench: Bench) -> Any:
    observer = Observer()
    model = Full()
    trainer = bench.trainer(callbacks=[observer])
    tested = trainer.test(model, loader(8), verbose=False)
    trainer.fit(model, loader())
    return tested, observer.weights


test_then_fit.__test__ = False  # type: ignore[attr-defined]


def accumulated_fit(bench: Bench) -> Any:
    """Five batches, accumulated by twos: the last step has one."""
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(Model(), loader(20))
    return observer.weights, observer.seen, trainer.global_step


def limits_and_intervals(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(
        callbacks=[observer], limit_train_batches=3, limit_val_batches=1, val_check_interval=2
    )
    trainer.fit(Full(), loader(), loader(8))
    return observer.seen, observer.weights


def fast_dev_run(bench: Bench) -> Any:
    trainer = bench.trainer(fast_dev_run=2)
    trainer.fit(Full(), loader(), loader(8))
    return _metrics(trainer), trainer.global_step


def overfit_batches(bench: Bench) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], overfit_batches=2, max_epochs=2)
    trainer.fit(Full(), loader(), loader(8))
    return observer.seen, observer.weights


def stop_from_hook(bench: Bench) -> Any:
    trainer = bench.trainer(max_steps=3, max_epochs=-1)
    trainer.fit(Full(), loader())
    return trainer.global_step, trainer.current_epoch


def fit_skipping_batches(bench: Bench) -> Any:
    trainer = bench.trainer()
    trainer.fit(ReturnsNone(), loader())
    return weights(trainer)


def _metrics(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


SCENARIOS = [
    fit_with_validation,
    fit_returning_dict,
    fit_skipping_batches,
    validate,
    test_loop,
    predict,
    predict_with_default_step,
    evaluation_with_short_batches,
    several_loaders,
    fit_twice,
    fit_then_test_and_predict,
    fit_then_another_trainer,
    test_then_fit,
    accumulated_fit,
    limits_and_intervals,
    fast_dev_run,
    overfit_batches,
    stop_from_hook,
]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect(SCENARIOS, Layout())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario)
