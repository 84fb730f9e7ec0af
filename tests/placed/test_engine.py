"""The engine on several ranks gives the numbers of one process, recorded and followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.placed.rig import Case, run_cases, samples
from tests.placed.steps import (
    ALTERNATING,
    EACH,
    HALVES,
    U_SHAPE,
    Chain,
    Tied,
    chain_loss,
    ping_pong,
    tied_head,
    u_shape,
)
from tests.support.launch import run_ranks


def repeated(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = x
    for _ in range(2):
        h = torch.tanh(model.b(torch.tanh(model.a(h)))) + h
    return model.d(model.c(h)).square().mean()


def sent_after_return(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """A value goes on into a later segment of its rank, and only then to the other rank."""
    h = torch.tanh(model.a(x))
    kept = h * 2
    back = model.b(model.c(h)) * kept
    return (model.d(kept) + back).square().mean()


def view_without_gradients(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = torch.tanh(model.a(x))
    with torch.no_grad():
        view = h.view(-1).view_as(h)
    return model.d(torch.tanh(model.c(view))).square().mean() + h.square().mean()


def late_parameter(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """A stage's parameter goes to another one after the stage has waited for that one."""
    h = torch.tanh(model.a(torch.tanh(model.c(x))))
    back = model.d(h)
    return (h * model.c.bias).square().mean() + back.square().mean()


def two_losses(model: nn.Module, x: Tensor, number: int) -> dict[str, Tensor]:
    h = model.b(model.a(x))
    out = model.d(model.c(h))
    return {"loss": out.square().mean() + h.abs().mean(), "hidden": h, "out": out.detach()}


def early_loss(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """The loss does not depend on the last stage, which runs all the same."""
    h = model.a(x)
    model.d(model.c(h.detach()))
    return model.b(h).square().mean()


def both_ends(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """Two branches that meet on the last stage."""
    return (model.d(model.a(x)) * model.c(model.b(x))).mean()


def gradient_hook(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))
    h.register_hook(lambda gradient: gradient * 2)
    return model.d(model.c(h)).square().mean()


def frozen_first(model: nn.Module) -> None:
    model.a.requires_grad_(False)


def uneven() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [[torch.randn(n, 4, generator=generator) for n in (3, 2, 2)] for _ in range(3)]


TWO = {
    "chain": Case(make=Chain, stages=HALVES, step=chain_loss),
    "one microbatch": Case(make=Chain, stages=HALVES, step=chain_loss, steps=samples(3, 1)),
    "many microbatches": Case(make=Chain, stages=HALVES, step=chain_loss, steps=samples(2, 7)),
    "uneven microbatches": Case(make=Chain, stages=HALVES, step=chain_loss, steps=uneven()),
    "reversed": Case(make=Chain, stages={"a": 1, "b": 1, "c": 0, "d": 0}, step=chain_loss),
    "ping-pong": Case(make=Chain, stages=ALTERNATING, step=ping_pong),
    "ping-pong, many": Case(make=Chain, stages=ALTERNATING, step=ping_pong, steps=samples(2, 6)),
    "U shape": Case(make=Chain, stages=U_SHAPE, step=u_shape),
    "U shape, forth and back": Case(make=Chain, stages=ALTERNATING, step=u_shape),
    "repeated units": Case(make=Chain, stages=ALTERNATING, step=repeated),
    "view without gradients": Case(make=Chain, stages=HALVES, step=view_without_gradients),
    "late parameter": Case(make=Chain, stages=HALVES, step=late_parameter),
    "sent after return": Case(make=Chain, stages=HALVES, step=sent_after_return),
    "tied head": Case(make=Tied, stages={"emb": 0, "a": 0, "b": 1}, step=tied_head),
    "two losses": Case(make=Chain, stages=HALVES, step=two_losses),
    "early loss": Case(make=Chain, stages=HALVES, step=early_loss),
    "branches": Case(make=Chain, stages=ALTERNATING, step=both_ends),
    "hook on a gradient": Case(make=Chain, stages=HALVES, step=gradient_hook),
    "frozen": Case(make=Chain, stages=HALVES, step=chain_loss, prepare=frozen_first),
    "empty stage": Case(make=Chain, stages=dict.fromkeys("abcd", 0), step=chain_loss),
}
FOUR = {
    "chain": Case(make=Chain, stages=EACH, step=chain_loss, steps=samples(2, 5)),
    "U shape": Case(make=Chain, stages=EACH, step=u_shape),
    "back and forth": Case(make=Chain, stages={"a": 0, "b": 2, "c": 1, "d": 3}, step=repeated),
    "tied head": Case(make=Tied, stages={"emb": 0, "a": 1, "b": 3}, step=tied_head),
    "empty stages": Case(make=Chain, stages={"a": 0, "b": 0, "c": 3, "d": 3}, step=chain_loss),
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str]]:
    return run_ranks(run_cases, 2, TWO, timeout=120)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, str]]:
    return run_ranks(run_cases, 4, FOUR, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(TWO))
def test_two_stages_equal_one_process(name: str, two_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in two_ranks] == [""] * 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(FOUR))
def test_four_stages_equal_one_process(name: str, four_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in four_ranks] == [""] * 4
