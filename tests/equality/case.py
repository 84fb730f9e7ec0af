"""A case of the zoo: a LightningModule, its data, and what a comparison has to respect.

Nothing here knows the smp strategy. Sizes are tiny and everything is float64, so that two runs that
compute the same thing agree to about 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "NUM_CLASSES",
    "NUM_FEATURES",
    "NUM_SAMPLES",
    "SEED",
    "SEQUENCE",
    "VOCABULARY",
    "Case",
    "Samples",
    "Trainable",
    "as_loss",
    "block",
    "case",
    "images",
    "points",
    "tokens",
]

SEED = 1234
NUM_SAMPLES = 32  # a multiple of batch size (4) x dp (2), enough for four steps
NUM_FEATURES = 8
NUM_CLASSES = 4
VOCABULARY = 32
SEQUENCE = 6


class Samples(Dataset[Any]):
    """A list of samples, each a tensor, a tuple or a dict of tensors."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One entry of the zoo.

    ``make_module`` and ``make_data`` give equal results at every call. ``needs_same_split`` says
    that the loss of a batch is not the mean of its microbatches' losses (a branch on the loss, a
    running statistic), so a reference must cut the batch as the run under test does. ``noise`` says
    where random numbers are drawn: ``"outer"`` in the step itself and on nothing that a model
    computed, ``"inside"`` in modules or on values that depend on them.
    """

    name: str
    make_module: Callable[[], pl.LightningModule]
    make_data: Callable[[], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None
    needs_same_split: bool = False
    noise: Literal["none", "outer", "inside"] = "none"
    microbatches: tuple[int, ...] = (1, 2, 4)
    min_pp: int = 1
    max_pp: int = 4
    max_dp: int = 2
    batch_size: int = 4  # of one data-parallel replica
    steps: int = 3  # batches; optimizer steps too, unless gradients are accumulated
    rtol: float = 1e-9
    validates: bool = False
    compares_losses: bool = True
    may_be_refused: bool = False  # an UnsupportedError is an answer too: equal, or refused by name
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


class Trainable(pl.LightningModule):
    """What the zoo's modules share: SGD with momentum, so that one wrong gradient stays visible."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def case(
    name: str,
    build: Callable[[], pl.LightningModule],
    data: Callable[[], Dataset[Any]],
    **options: Any,
) -> Case:
    """Return a case whose module is built with a fixed seed and converted to float64."""

    def make_module() -> pl.LightningModule:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return build().double()

    return Case(name=name, make_module=make_module, make_data=data, **options)


def points(count: int = NUM_SAMPLES) -> Samples:
    """Return samples (features [NUM_FEATURES], class)."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(count, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    return Samples(list(zip(x, y, strict=True)))


def images(count: int = NUM_SAMPLES) -> Samples:
    """Return samples (image [1, 8, 8], class)."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    return Samples(list(zip(x, y, strict=True)))


def tokens(count: int = NUM_SAMPLES) -> Samples:
    """Return samples {"input_ids": [SEQUENCE]}."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)
    return Samples([{"input_ids": row} for row in ids])


def block(width_in: int = NUM_FEATURES, width_out: int = NUM_FEATURES) -> nn.Module:
    """Return a small module with parameters that reads its input through a smooth function."""
    return nn.Sequential(nn.Linear(width_in, width_out), nn.Tanh())


def as_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of prediction [B, NUM_CLASSES]."""
    return nn.functional.cross_entropy(prediction, target)
