"""Ordinary modules: MLP, CNN, LSTM, U-Net, siamese, frozen and unused parts, structured outputs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.case import (
    NUM_CLASSES,
    NUM_FEATURES,
    Case,
    Samples,
    Trainable,
    as_loss,
    block,
    case,
    images,
    points,
)

__all__ = ["CASES"]

Batch = tuple[Tensor, Tensor]
Pair = namedtuple("Pair", ["hidden", "gate"])


@dataclass
class Hidden:
    """What a module of the zoo returns as a dataclass."""

    value: Tensor
    scale: float


class MLP(Trainable):
    """A chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(block() for _ in range(4)), nn.Linear(NUM_FEATURES, NUM_CLASSES))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = as_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss


class BatchNormCNN(Trainable):
    """Convolutions with batch statistics, which belong to a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return as_loss(self.head(self.body(self.stem(x)).mean(dim=(2, 3))), y)


class Recurrent(Trainable):
    """An LSTM, whose output is a tensor and a tuple of states that are used too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        output, (_, cell) = self.lstm(x.unsqueeze(-1))
        return as_loss(self.head(output[:, -1] + cell[-1]), y)


class UNet(Trainable):
    """Skips from every level of the way down to the same level of the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(2))
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.leave = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the size of x [B, 1, H, W]."""
        h = torch.tanh(self.enter(x))
        skips = []
        for down in self.down:
            skips.append(h)
            h = torch.tanh(down(h))
        h = torch.tanh(self.middle(h))
        for up in self.up:
            h = torch.cat([F.interpolate(h, scale_factor=2), skips.pop()], dim=1)
            h = torch.tanh(up(h))
        return self.leave(h)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, _ = batch
        return F.mse_loss(self(x), x.flip(-1))


class Diffusion(UNet):
    """Noise and time steps drawn in the step, as diffusion models do."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, _ = batch
        time = torch.randint(1, 10, (x.shape[0],), device=x.device).view(-1, 1, 1, 1) / 10
        noise = torch.randn_like(x)
        return F.mse_loss(self(x * (1 - time) + noise * time), noise)


class Siamese(Trainable):
    """One encoder called three times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(block(), block())
        self.head = block()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, _ = batch
        anchor, near, far = (self.head(self.encoder(view)) for view in (x, x * 1.1, x.flip(-1)))
        return F.triplet_margin_loss(anchor, near, far, margin=2.0)


class PartlyFrozen(Trainable):
    """A frozen encoder run under no_grad, and a frozen layer that gradients pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(block(), block())
        self.body = nn.Sequential(block(), block(), block())
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.encoder.requires_grad_(requires_grad=False)
        self.body[1].requires_grad_(requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            h = self.encoder(x)
        return as_loss(self.head(self.body(h)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


class Unused(Trainable):
    """A whole module and a parameter that no step touches; another that only even steps touch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = block()
        self.sometimes = block()
        self.never = block()
        self.orphan = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.first(x)
        if batch_idx % 2 == 0:
            h = self.sometimes(h)
        return as_loss(self.head(h), y)


class OwnParameters(Trainable):
    """Parameters held by the LightningModule itself: logit scale, class token, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, NUM_FEATURES)
        self.cls_token = nn.Parameter(torch.randn(1, 1, NUM_FEATURES))
        self.positions = nn.Parameter(torch.randn(1, 5, NUM_FEATURES))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.mixers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        patches = self.embed(x.view(x.shape[0], 4, 2))
        h = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions
        for mixer in self.mixers:
            h = h + mixer(h.mean(dim=1, keepdim=True))
        return as_loss(self.head(h[:, 0]) * self.logit_scale.exp(), y)


class Returns(nn.Module):
    """A block that returns its result in the structure asked for, and None for a side output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = block()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        """Return x transformed, in a dict, tuple, named tuple or dataclass; or None."""
        h = self.inner(x) if context is None else self.inner(x) + context
        results: dict[str, Any] = {
            "dict": {"hidden": h, "extra": {"mean": h.mean()}, "note": "text"},
            "tuple": (h, None, [h * 2, 3]),
            "namedtuple": Pair(h, h.sigmoid()),
            "dataclass": Hidden(h, 0.5),
            "none": None,
        }
        return results[self.kind]


class Structures(Trainable):
    """Modules that return dict, tuple, named tuple, dataclass and None."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Returns("dict"), Returns("tuple")
        self.c, self.d, self.e = Returns("namedtuple"), Returns("dataclass"), Returns("none")
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        first = self.a(x)
        second, nothing, (double, factor) = self.b(first["hidden"], context=first["hidden"])
        third = self.c(second if nothing is None else nothing)
        fourth = self.d(third.hidden * third.gate + double / factor)
        assert self.e(fourth.value) is None
        loss = as_loss(self.head(fourth.value * fourth.scale), y) + 0.1 * first["extra"]["mean"]
        return {"loss": loss, "hidden": third.hidden.detach()}


class RegressionOnly(Trainable):
    """A step that takes a dict batch with texts and numbers beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(), block(), nn.Linear(NUM_FEATURES, 1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert all(isinstance(name, str) for name in batch["name"])
        return F.mse_loss(self.net(batch["x"]).squeeze(-1), batch["target"])


def named_points() -> Samples:
    """Return samples with a text and a float beside the features."""
    return Samples(
        [{"x": x, "target": x.sum(), "name": f"sample {i}"} for i, (x, _) in enumerate(points())]
    )


CASES: tuple[Case, ...] = (
    case("mlp", MLP, points),
    case("cnn_batchnorm", BatchNormCNN, images, microbatches=(1,), max_dp=1),
    case("lstm", Recurrent, points),
    case("unet", UNet, images),
    case("diffusion", Diffusion, images, noise="outer"),
    case("siamese", Siamese, points),
    case("partly_frozen", PartlyFrozen, points),
    case("unused_parameters", Unused, points),
    case("own_parameters", OwnParameters, points),
    case("structured_returns", Structures, points),
    case("dict_batch", RegressionOnly, named_points),
)
