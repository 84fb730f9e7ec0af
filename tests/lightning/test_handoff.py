"""The hand-off's gradient: known from the graph where that says it, read everywhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_smp.lightning.handoff import KnownGradient, hand_off

Change = Callable[[Tensor], Tensor]


def gradients(change: Change, later: Callable[[Tensor, Tensor], object]) -> list[float | None]:
    """[what was known, what came] for a loss that is changed before and after it is looked at."""
    found: list[float | None] = []
    known: list[KnownGradient] = []

    def install(gradient: Tensor) -> None:
        found.extend((known[0].of(loss), float(gradient)))

    loss = hand_off(torch.tensor(3.0), install)
    given = change(loss)
    known.append(KnownGradient(given))
    later(loss, given)
    given.backward()
    return found


def nothing(loss: Tensor, given: Tensor) -> None:
    pass


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x / 1, lambda x: x / 4])
def test_what_lightning_does_to_the_loss_is_known(change: Change) -> None:
    known, came = gradients(change, nothing)
    assert known == came


@pytest.mark.parametrize(
    ("change", "later"),
    [
        (lambda x: x * 2, nothing),
        (lambda x: x / 2 / 2, nothing),
        (lambda x: x / torch.tensor(2.0, requires_grad=True), lambda _, given: given.mul_(3)),
        (lambda x: x + x, nothing),
        (lambda x: x / 4, lambda _, given: given.mul_(3)),
        (lambda x: x / 4, lambda _, given: given.register_hook(lambda g: g * 5)),
        (lambda x: x / 4, lambda loss, _: loss.register_hook(lambda g: g * 5)),
    ],
)
def test_what_a_user_does_to_it_is_read(
    change: Change, later: Callable[[Tensor, Tensor], object]
) -> None:
    known, _ = gradients(change, later)
    assert known is None
