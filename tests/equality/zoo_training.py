"""What surrounds the step: optimizers, schedules, clipping, accumulation, logs and metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional.classification import multiclass_accuracy

from tests.equality.case import (
    NUM_CLASSES,
    NUM_FEATURES,
    Case,
    Samples,
    Trainable,
    as_loss,
    block,
    case,
    points,
)
from tests.equality.zoo_python import Chain

__all__ = ["CASES"]

Batch = tuple[Tensor, Tensor]


class Classifier(Chain):
    """The plain step, for cases that differ in what surrounds it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        loss = as_loss(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class AdamWGroups(Classifier):
    """AdamW with weight decay chosen by the parameters' names and shapes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = list(self.named_parameters())
        decayed = [p for n, p in named if n.endswith("weight") and p.ndim > 1]
        others = [p for n, p in named if not (n.endswith("weight") and p.ndim > 1)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


class Scheduled(Classifier):
    """A learning rate that changes at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Extras(Chain):
    """Returns a dictionary, and reads it in a hook that runs after the batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        return {"loss": as_loss(logits, y), "logits": logits.detach(), "note": "text"}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        assert outputs["note"] == "text" or set(outputs["note"]) == {"text"}
        assert outputs["logits"].shape[-1] == NUM_CLASSES


class SkippedStep(Chain):
    """Returns None for one batch, which Lightning skips."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = as_loss(self(x), y)
        return None if batch_idx == 1 else loss


class OtherLoss(Chain):
    """Computes two losses and returns one of them, by turns."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        early = as_loss(self.blocks[0](x)[:, :NUM_CLASSES], y)
        late = as_loss(self(x), y)
        return early if batch_idx == 1 else late


class Logging(Chain):
    """Every way to log that does not depend on how the batch is split."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        self.log("step_only", losses.mean(), on_step=True, on_epoch=False, sync_dist=True)
        self.log("both", losses.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", losses.max(), on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("smallest", losses.min(), on_epoch=True, reduce_fx="min", sync_dist=True)
        self.log("samples", float(len(y)), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("number", 3.0, prog_bar=True, on_epoch=True, sync_dist=True)
        self.log("weighted", losses.mean(), on_epoch=True, batch_size=len(y), sync_dist=True)
        self.log_dict(
            {"size/mean": logits.abs().mean(), "size/input": x.abs().mean()},
            on_epoch=True,
            sync_dist=True,
        )
        return losses.mean()


class Metrics(Chain):
    """A torchmetrics object updated in the step and logged itself, and a functional metric."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.train_accuracy(logits, y)
        self.log("accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        share = multiclass_accuracy(logits, y, NUM_CLASSES, average="micro")
        self.log("share", share, on_step=False, on_epoch=True, sync_dist=True)
        return as_loss(logits, y)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", as_loss(logits, y), sync_dist=True)


class ModuleDropout(Trainable):
    """nn.Dropout inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(block(), nn.Dropout(0.3)) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(NUM_FEATURES, NUM_CLASSES))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return as_loss(self.net(x), y)


class OuterDropout(Chain):
    """F.dropout on computed values, and on the input, in the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = F.dropout(x, 0.1)
        for layer in self.blocks:
            h = F.dropout(layer(h), 0.2, training=self.training)
        return as_loss(self.head(h), y)


class GAN(Trainable):
    """Two networks and two optimizers, driven by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(block(), block(), nn.Linear(NUM_FEATURES, NUM_FEATURES))
        self.critic = nn.Sequential(block(), block(), nn.Linear(NUM_FEATURES, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        real, _ = batch
        for_generator, for_critic = self.optimizers()
        noise = torch.randn_like(real)
        self.toggle_optimizer(for_generator)
        loss = self.adversarial(self.generator(noise), real=True)
        self.log("generator_loss", loss, sync_dist=True)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        fake = self.adversarial(self.generator(noise).detach(), real=False)
        loss = (self.adversarial(real, real=True) + fake) / 2
        self.log("critic_loss", loss, sync_dist=True)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

    def adversarial(self, x: Tensor, *, real: bool) -> Tensor:
        """Return the critic's loss when it should answer ``real`` for x."""
        answer = self.critic(x)
        wanted = torch.full_like(answer, float(real))
        return F.binary_cross_entropy_with_logits(answer, wanted)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.critic.parameters(), lr=0.01),
        ]


def uneven_points() -> Samples:
    """Return samples whose last batch is short: two batches of four, one of three."""
    return points(11)


CASES: tuple[Case, ...] = (
    case("adamw_groups", AdamWGroups, points),
    case("scheduler_per_step", Scheduled, points, steps=4),
    case("clip_by_norm", Classifier, points, trainer={"gradient_clip_val": 0.05}),
    case(
        "clip_by_value",
        Classifier,
        points,
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    case("accumulate", Classifier, points, steps=4, trainer={"accumulate_grad_batches": 2}),
    case(
        "accumulate_clip_schedule",
        Scheduled,
        points,
        steps=4,
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ),
    case("returns_extras", Extras, points),
    case("skipped_step", SkippedStep, points, compares_losses=False),
    case("other_loss", OtherLoss, points),
    case("logging", Logging, points),
    case("metrics", Metrics, points, validates=True),
    case("dropout_modules", ModuleDropout, points, noise="inside"),
    case("dropout_outer", OuterDropout, points, noise="inside"),
    case("gan_manual", GAN, points, noise="outer", microbatches=(1,), compares_losses=False),
    case("uneven_last_batch", Classifier, uneven_points, max_dp=1, strategy={"drop_last": False}),
)
