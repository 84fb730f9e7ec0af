"""The hand-off: its gradient, known or read, and where a step's gradients wait for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.handoff import (
    ExpectedGradient,
    GradientStash,
    GradientSum,
    KnownGradient,
    hand_off,
)

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


def test_a_second_backward_is_refused() -> None:
    found: list[float] = []
    loss = hand_off(torch.tensor(3.0), lambda gradient: found.append(float(gradient)))
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="Multiply the loss instead"):
        (loss * 2).backward()
    assert found == [1.0]


@pytest.mark.parametrize("share", [1.0, 1 / 3, 1 / 49])
def test_what_was_expected_came_once(share: float) -> None:
    came = torch.tensor(share, dtype=torch.float16)  # rounded
    assert ExpectedGradient(share).times(came, None) == 1.0
    assert ExpectedGradient(share).times(came, share) == 1.0
    assert ExpectedGradient(share).times(came * 2, None) == pytest.approx(2.0, rel=1e-3)
    assert ExpectedGradient(share).times(came, 3 * share) == pytest.approx(3.0)


def test_a_scale_is_read_only_where_others_may_have_changed_the_loss() -> None:
    scale = torch.tensor(64.0)
    came = torch.tensor(48.0)
    sure = ExpectedGradient(0.25, scale, is_sure=True)
    assert float(sure.seed) == 16.0
    assert sure.times(came, 0.25) == 1.0
    assert ExpectedGradient(0.25, scale).times(came, 0.25) == 3.0
    assert sure.times(came, None) == 3.0


def _parameters(*gradients: float | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full((2,), gradient)
    return made


def _first_values(parameters: list[nn.Parameter]) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for p in parameters]


def test_a_stash_adds_later() -> None:
    parameters = _parameters(1.0, None, 4.0, None)
    parameters[2].requires_grad_(False)
    stash = GradientStash(parameters)
    assert _first_values(parameters) == [None, None, 4.0, None]
    parameters[0].grad, parameters[1].grad = torch.full((2,), 2.0), torch.full((2,), 3.0)
    stash.close()
    assert _first_values(parameters) == [1.0, None, 4.0, None]
    stash.install(0.5)
    assert _first_values(parameters) == [2.0, 1.5, 4.0, None]


def test_a_stash_of_a_failed_step_is_as_before() -> None:
    parameters = _parameters(1.0, None)
    stash = GradientStash(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros(2)
    stash.restore()
    assert _first_values(parameters) == [1.0, None]


def test_a_sum_takes_no_factor() -> None:
    GradientSum().install(1.0)
    with pytest.raises(UnsupportedError, match=r"multiplied by 2\.0 between the step"):
        GradientSum().install(2.0)
