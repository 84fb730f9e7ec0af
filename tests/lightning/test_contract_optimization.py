"""Optimizers, schedulers, clipping and manual optimization: weights as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.lightning.contract import (
    Bench,
    GradientWatcher,
    Layout,
    ManualWithCritic,
    Model,
    Results,
    assert_close,
    loader,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Observer(pl.Callback):
    """Records learning rates after every batch, and the weights at the end."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights = weights(trainer)


class Scheduled(Model):
    """A scheduler of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(lr=0.3)
        self.kind = kind

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * 0 + self.current_epoch + batch[0].mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        scheduler = schedulers.StepLR(optimizer, step_size=1, gamma=0.7)
        config = {"scheduler": scheduler, "interval": self.kind, "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


class OneCycle(Model):
    """A scheduler that changes the momentum too, sized by the Trainer's estimate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Grouped(Model):
    """Parameter groups by name, as fine-tuning recipes make them."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.05)


class MadeBefore(Model):
    """Returns an optimizer that existed before the Trainer, as LightningCLI's do."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.Adam(self.parameters(), lr=0.05, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.made, 0.8)

    def configure_optimizers(self) -> Any:
        return [self.made], [self.scheduler]


class ClipsItself(Model):
    """Clips in the module's own hook, by torch's function on its own parameters."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class WatchesGradients(GradientWatcher):
    """Records the gradients that each hook around the backward sees."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()

    def on_before_backward(self, loss: Tensor) -> None:
        self.look()

    def on_after_backward(self) -> None:
        self.look()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


class LogsNorms(Model):
    """Logs the norms of all gradients, as Lightning's documentation does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log("second", grad_norm(self.second, norm_type="inf")["grad_inf_norm_total"])


class ClipsOuter(ClipsItself):
    """Has a parameter outside of all units, which every stage holds, in the first norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Manual(ManualWithCritic):
    """Manual optimization: two optimizers, toggles, a clip, a scheduler stepped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        self.toggle_optimizer(one)
        loss = self.loss(batch)
        one.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        one.step()
        self.untoggle_optimizer(one)
        self.toggle_optimizer(two)
        with torch.no_grad():
            logits = self(batch[0])
        score = self.critic(logits).pow(2).mean()
        self.manual_backward(score)
        if batch_idx % 2:
            two.step()
            two.zero_grad()
        self.untoggle_optimizer(two)
        self.log_dict({"loss": loss, "score": score}, on_epoch=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        one, two = self.both_optimizers()
        return [one, two], [torch.optim.lr_scheduler.ExponentialLR(one, 0.5)]


class ManualClips(Model):
    """Clips by torch's own function in a manual step, and logs the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        norms = grad_norm(self, norm_type=2)
        total = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.log_dict({**norms, "total": total}, on_step=False, on_epoch=True)
        optimizer.step()


def _train(bench: Bench, model: Model, **options: Any) -> Any:
    observer = Observer()
    # In float64, so that an optimizer that divides by small moments does not show the rounding.
    options = {"max_epochs": 2, "precision": "64-true", **options}
    trainer = bench.trainer(callbacks=[observer], **options)
    trainer.fit(model, loader(), loader(8) if hasattr(model, "kind") else None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return observer.weights, observer.rates, trainer.global_step, metrics


def plain(bench: Bench) -> Any:
    return _train(bench, Model())


def schedule_by_step(bench: Bench) -> Any:
    return _train(bench, Scheduled("step"))


def schedule_by_epoch(bench: Bench) -> Any:
    return _train(bench, Scheduled("epoch"), max_epochs=4)


def schedule_on_plateau(bench: Bench) -> Any:
    return _train(bench, Scheduled("plateau"), max_epochs=4)


def one_cycle(bench: Bench) -> Any:
    return _train(bench, OneCycle(), accumulate_grad_batches=2)


def parameter_groups(bench: Bench) -> Any:
    return _train(bench, Grouped())


def made_before(bench: Bench) -> Any:
    return _train(bench, MadeBefore())


def clip_by_norm(bench: Bench) -> Any:
    return _train(bench, Model(), gradient_clip_val=0.05)


def clip_by_value(bench: Bench) -> Any:
    return _train(bench, Model(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


def clip_accumulated(bench: Bench) -> Any:
    return _train(bench, Model(), gradient_clip_val=0.05, accumulate_grad_batches=2)


def clip_in_hook(bench: Bench) -> Any:
    return _train(bench, ClipsItself())


def gradients_in_hooks(bench: Bench) -> Any:
    model = WatchesGradients()
    _train(bench, model, accumulate_grad_batches=2)
    return model.seen


def clip_outer_in_hook(bench: Bench) -> Any:
    return _train(bench, ClipsOuter())


def gradient_norms(bench: Bench) -> Any:
    return _train(bench, LogsNorms())


def manual(bench: Bench) -> Any:
    return _train(bench, Manual(), smp={"microbatches": 1} if bench.is_smp else None)


def manual_clips(bench: Bench) -> Any:
    return _train(bench, ManualClips(), smp={"microbatches": 1} if bench.is_smp else None)


def manual_with_microbatches(bench: Bench) -> str:
    try:
        bench.trainer().fit(Manual(), loader())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCENARIOS = [
    clip_outer_in_hook,
    gradient_norms,
    plain,
    schedule_by_step,
    schedule_by_epoch,
    schedule_on_plateau,
    one_cycle,
    parameter_groups,
    made_before,
    clip_by_norm,
    clip_by_value,
    clip_accumulated,
    clip_in_hook,
    manual,
    manual_clips,
]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect([*SCENARIOS, gradients_in_hooks, manual_with_microbatches], Layout())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=1e-6, atol=1e-9)


def test_clips_are_active() -> None:
    """The comparisons above would not notice a clip that does nothing."""
    free = plain(Bench())[0]["head.weight"]
    for scenario in (clip_by_norm, clip_by_value, clip_in_hook):
        assert not torch.allclose(scenario(Bench())[0]["head.weight"], free, rtol=1e-2)


def test_manual_with_microbatches_is_refused(results: Results) -> None:
    for message in results.ranks(manual_with_microbatches):
        assert "UnsupportedError" in message
        assert "manual optimization with microbatches=2" in message
        assert "microbatches=1" in message


def test_hooks_see_the_gradients_of_one_device(results: Results) -> None:
    """Each rank sees those of its stage; together they see all of them, at every hook."""
    expected = gradients_in_hooks(Bench())
    ranks = results.ranks(gradients_in_hooks)
    for index, gradients in enumerate(expected):
        seen = {name: value for found in ranks for name, value in found[index].items()}
        assert_close(dict(sorted(seen.items())), dict(sorted(gradients.items())), f"look {index}")
    assert all(len(found) == len(expected) for found in ranks)
