"""Hooks are called in plain Lightning's order, with the same numbers of calls, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.lightning.contract import Bench, Layout, Model, Results, loader

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test

_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_DEPRECATED = ("configure_sharded_model",)
_MODULE_HOOKS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "backward",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)


class Steps(Model):
    """All steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def _hook_names() -> list[str]:
    classes = (ModelHooks, DataHooks, CheckpointHooks)
    names = {name for kind in classes for name in vars(kind) if not name.startswith("_")}
    return sorted((names | set(_MODULE_HOOKS)) - {*_LOADERS, *_DEPRECATED})


def _recorded(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        original = getattr(super(RecordingModel, self), name)
        # Lightning looks at whether these are there, so they must be, and do what they did.
        return original(*args, **kwargs)

    return hook


class RecordingModel(Steps):
    """Records the name of every hook that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []


for _name in _hook_names():
    setattr(RecordingModel, _name, _recorded(_name))


class RecordingCallback(pl.Callback):
    """Records the name of every hook of a callback."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls


def _recorded_in_callback(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"callback.{name}")
        return getattr(pl.Callback, name)(self, *args, **kwargs)

    return hook


for _name in vars(pl.Callback):
    if _name.startswith("on_") or _name in ("setup", "teardown"):
        setattr(RecordingCallback, _name, _recorded_in_callback(_name))


def _calls(bench: Bench, run: str, **options: Any) -> list[str]:
    model = RecordingModel()
    trainer = bench.trainer(callbacks=[RecordingCallback(model.calls)], **options)
    if run == "fit":
        trainer.fit(model, loader(12), loader(8))
    elif run == "predict":
        trainer.predict(model, loader(8))
    else:
        getattr(trainer, run)(model, loader(8), verbose=False)
    return [name for name in model.calls if name not in ("forward", "configure_callbacks")]


def hooks_of_fit(bench: Bench) -> Any:
    return _calls(bench, "fit", max_epochs=2, num_sanity_val_steps=1)


def hooks_of_accumulated_fit(bench: Bench) -> Any:
    return _calls(bench, "fit", accumulate_grad_batches=2, gradient_clip_val=0.1)


def hooks_of_validate(bench: Bench) -> Any:
    return _calls(bench, "validate")


def hooks_of_test(bench: Bench) -> Any:
    return _calls(bench, "test")


def hooks_of_predict(bench: Bench) -> Any:
    return _calls(bench, "predict")


SCENARIOS = [
    hooks_of_fit,
    hooks_of_accumulated_fit,
    hooks_of_validate,
    hooks_of_test,
    hooks_of_predict,
]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect(SCENARIOS, Layout())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_order_equals_one_device(results: Results, scenario: Any) -> None:
    """A step is called once for each microbatch; the second call in a row is not compared."""
    expected = scenario(Bench())
    assert len(set(expected)) > 15
    for rank, found in enumerate(results.ranks(scenario)):
        # Lightning prepares data on the first rank of each node only.
        skipped = {"prepare_data"} if rank else set()
        wanted = [name for name in expected if name not in skipped]
        assert _without_repeated_steps(found) == wanted


def _without_repeated_steps(calls: list[str]) -> list[str]:
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    pairs = zip(["", *calls], calls, strict=False)
    return [name for before, name in pairs if not (name in steps and name == before)]
