"""Every precision gives the weights of one device in that precision; overflows are agreed on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.lightning.contract import FEATURES, Bench, Layout, Model, Results, loader, weights

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test

_HUGE = 50.0


class Observer(pl.Callback):
    """Records losses, weights, scales and types."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.heads: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)
        self.heads.append(weights(trainer)["head.bias"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights = weights(trainer)


class Typed(Model):
    """Logs what type the step computes in."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.types = [str(logits.dtype), str(batch[0].dtype), str(self.head.weight.dtype)]
        return nn.functional.cross_entropy(logits, batch[1])


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class Overflowing(nn.Module):
    """A layer whose gradients become inf for a batch with a huge value in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.clamp(-3, 3))
        factor = torch.where(x.abs().amax() > _HUGE, float("inf"), 1.0).to(y.dtype)
        return _Overflow.apply(y, factor)  # type: ignore[no-any-return]


class OverflowsOnFirstStage(Typed):
    """Only gradients of the first stage overflow; the others are finite."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = nn.Sequential(Overflowing(), nn.Tanh())


class HugeAt(torch.utils.data.Dataset[Any]):
    """Points, with a huge value in some samples."""

    def __init__(self, *indices: int) -> None:
        self.points = loader().dataset
        self.indices = indices

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return (x * 1e4 if index in self.indices else x), y


def _train(bench: Bench, model: Model, train: Any = None, **options: Any) -> Any:
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], max_epochs=2, **options)
    trainer.fit(model, train or loader())
    types = getattr(model, "types", None)
    return types, observer.losses, observer.scales, observer.heads, observer.weights


def _half_scaled(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


def single(bench: Bench) -> Any:
    return _train(bench, Typed(), precision="32-true")


def double(bench: Bench) -> Any:
    return _train(bench, Typed(), precision="64-true")


def bfloat_mixed(bench: Bench) -> Any:
    return _train(bench, Typed(), precision="bf16-mixed")


def bfloat_true(bench: Bench) -> Any:
    return _train(bench, Typed(), precision="bf16-true")


def half_mixed(bench: Bench) -> Any:
    """The scale grows every three steps."""
    plugin = _half_scaled(init_scale=64.0, growth_interval=3)
    return _train(bench, Typed(), plugins=plugin, gradient_clip_val=0.1)


def half_mixed_with_overflow(bench: Bench) -> Any:
    plugin = _half_scaled(init_scale=64.0, growth_interval=100)
    return _train(
        bench, OverflowsOnFirstStage(), torch.utils.data.DataLoader(HugeAt(5), 4), plugins=plugin
    )


SCENARIOS = [single, double, bfloat_mixed, bfloat_true, half_mixed, half_mixed_with_overflow]
_ROUNDING = {"bfloat_mixed": 2e-2, "bfloat_true": 6e-2, "half_mixed": 4e-3}


@pytest.fixture(scope="module")
def whole() -> Results:
    return Results.collect(SCENARIOS, Layout(microbatches=1))


@pytest.fixture(scope="module")
def split() -> Results:
    return Results.collect(SCENARIOS, Layout(microbatches=2))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_whole_batches_equal_one_device(whole: Results, scenario: Any) -> None:
    """The same operations in the same order: no rounding differs."""
    rtol = 1e-12 if scenario is double else 1e-6
    whole.assert_like_one_device(scenario, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_microbatches_equal_one_device_up_to_rounding(split: Results, scenario: Any) -> None:
    rtol = _ROUNDING.get(scenario.__name__, 1e-11 if scenario is double else 5e-3)
    split.assert_like_one_device(scenario, rtol=rtol, atol=rtol)


def test_overflow_on_one_stage_skips_the_step_on_all(split: Results) -> None:
    for _, _, scales, heads, _ in split.ranks(half_mixed_with_overflow):
        skipped = [index for index in range(1, 8) if torch.equal(heads[index], heads[index - 1])]
        assert skipped == [1, 5]
        assert scales == [64.0, *[32.0] * 4, *[16.0] * 3]
