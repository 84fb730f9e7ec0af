"""Metrics that a step calls while their arguments come from other stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional

from tests.lightning.contract import Bench, Layout, Model, Results, loader

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test

_LAYOUTS = {
    "3 stages": Layout(pp=3, microbatches=4),
    "virtual": Layout(
        microbatches=4,
        options={"pipeline": "zero_bubble", "config": {"virtual_pipeline_degree": 2}},
    ),
}


class CallsMetrics(Model):
    """The metric comes first in the step, so that it is what waits for the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.many = torchmetrics.MetricCollection(
            {"rms": torchmetrics.MeanSquaredError(squared=False), "mae": _AbsoluteError()}
        )
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        target = functional.one_hot(batch[1], 3).to(logits)
        value = self.error(logits, target)
        self.many(logits, target)
        assert value.requires_grad == logits.requires_grad
        # Another visit of all stages, before the metric is logged.
        again = self.head(self.second(self.first(batch[0]) + logits.mean(1, keepdim=True)))
        self.mean(again.mean())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict(self.many, on_step=False, on_epoch=True)
        return functional.cross_entropy(again, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.seen += [float(metrics["error_step"]), float(metrics["mean_step"])]


class _AbsoluteError(torchmetrics.MeanAbsoluteError):
    full_state_update = True


class Tracks(Model):
    """The metric is copied at the start of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.tracker(logits, functional.one_hot(batch[1], 3).to(logits))
        return functional.cross_entropy(logits, batch[1])


class LosesByMetric(Model):
    """A metric's value alone is the loss, or a part of it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        value = self.error(logits, functional.one_hot(batch[1], 3).to(logits))
        rest = functional.cross_entropy(logits, batch[1])
        return value if self.share == 1.0 else value + rest


class LosesNothing(Model):
    """A loss that depends on no parameter: a constant, or zero where a batch is skipped."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.skips and batch_idx != 1:
            return self.loss(batch)
        return torch.zeros((), requires_grad=self.skips)


def metrics_of_a_step(bench: Bench) -> Any:
    model = CallsMetrics()
    trainer = bench.trainer(max_epochs=2)
    trainer.fit(model, loader(24, 8))
    return model.seen, {name: float(v) for name, v in sorted(trainer.callback_metrics.items())}


def tracked(bench: Bench) -> Any:
    model = Tracks()
    bench.trainer(max_epochs=2).fit(model, loader(24, 8))
    return [float(value) for value in model.tracker.compute_all()]


def skipped(bench: Bench) -> Any:
    model = LosesNothing(skips=True)
    trainer = bench.trainer(max_epochs=2)
    trainer.fit(model, loader(24, 8))
    return {name: float(v) for name, v in trainer.callback_metrics.items()}


def _message(bench: Bench, model: Model) -> str:
    try:
        bench.trainer().fit(model, loader(24, 8))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loss_is_a_metric(bench: Bench) -> str:
    return _message(bench, LosesByMetric(1.0))


def loss_is_constant(bench: Bench) -> str:
    return _message(bench, LosesNothing(skips=False))


def loss_has_a_metric(bench: Bench) -> str:
    return _message(bench, LosesByMetric(0.5))


EQUAL = [metrics_of_a_step, tracked, skipped]
REFUSED = {
    loss_is_a_metric: ("UnsupportedError", "metric 'error'", "torchmetrics.functional"),
    loss_is_constant: ("RuntimeError", "does not require grad"),  # as on one device
}


@pytest.fixture(scope="module", params=list(_LAYOUTS))
def results(request: pytest.FixtureRequest) -> Results:
    return Results.collect([*EQUAL, *REFUSED], _LAYOUTS[request.param])


@pytest.mark.parametrize("scenario", EQUAL, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: scenario.__name__)
def test_a_loss_without_gradient_is_an_error(results: Results, scenario: Any) -> None:
    for message in results.ranks(scenario):
        assert all(part in message for part in REFUSED[scenario]), message


def test_a_metric_in_the_loss_is_refused() -> None:
    # Alone: the rank of the loss fails in its backward, the others while they wait for it.
    found = Results.collect([loss_has_a_metric], Layout()).of["loss_has_a_metric"]
    assert "the loss depends on what the metric 'error' returned" in str(found)
