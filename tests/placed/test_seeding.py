"""A single stage: each unit draws from a stream of its own, whatever it draws from."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from lightning_smp.placed.random import digest_draws
from lightning_smp.placed.seeding import SeededUnits

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Draws from Python's generator, but only in training."""

    def forward(self, x: Any) -> Any:
        return x + random.random() if self.training else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()

    def forward(self, x: Any) -> Any:
        return self.noisy(x)


def test_what_a_unit_draws_from_is_learned_for_training_and_evaluation() -> None:
    model = Model()
    units = SeededUnits(model, CPU)
    units.install()

    def step(x: torch.Tensor) -> float:
        units.begin((3,))
        return float(model(x))

    zero = torch.zeros(())
    before = digest_draws(CPU)
    model.eval()
    assert [step(zero), step(zero)] == [0.0, 0.0]
    model.train()
    assert len({step(zero), step(zero), step(zero)}) == 1  # of the same microbatch
    assert digest_draws(CPU) == before
    units.remove()
