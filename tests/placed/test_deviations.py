"""Microbatches that leave their program: all ranks take the new path, and numbers stay right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.placed.rig import Case, run_cases
from tests.placed.steps import ALTERNATING, EACH, HALVES, U_SHAPE, Chain, chain_loss, u_shape
from tests.support.launch import run_ranks


def marked(*marks: str) -> list[list[Tensor]]:
    """A step for each string, a microbatch for each letter, whose content says which letter."""
    generator = torch.Generator().manual_seed(8)
    steps = []
    for letters in marks:
        step = []
        for letter in letters:
            x = torch.randn(2, 4, generator=generator)
            x[0, 0] = ord(letter) - ord("a")
            step.append(x)
        steps.append(step)
    return steps


def mark_of(x: Tensor) -> str:
    return chr(ord("a") + int(x[0, 0].item()))


def other_branch(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """The content of a plain microbatch chooses between two units of one stage."""
    h = torch.tanh(model.a(x))
    h = model.b(h) if mark_of(x) == "a" else h.sin() * 2
    return model.d(torch.tanh(model.c(h))).square().mean()


def other_stage(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """The branch skips all of a stage in between, or runs the stages in another order."""
    h = torch.tanh(model.a(x))
    names = {"a": "bcd", "b": "d", "c": "cbd", "d": "bb"}[mark_of(x)]
    for name in names:
        h = torch.tanh(getattr(model, name)(h))
    return h.square().mean()


def by_number(model: nn.Module, x: Tensor, number: int) -> Tensor:
    loss = chain_loss(model, x, number)
    return loss + model.a(x).abs().mean() if number % 3 == 1 else loss


def extra_at_end(model: nn.Module, x: Tensor, number: int) -> Tensor:
    loss = u_shape(model, x, number)
    return loss * 2 + model.d.weight.abs().sum() if mark_of(x) == "b" else loss


def ends_early(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = torch.tanh(model.b(torch.tanh(model.a(x))))
    if mark_of(x) == "b":
        return h.square().mean()
    return model.d(torch.tanh(model.c(h))).square().mean()


def by_value(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """The branch depends on a placed value."""
    h = torch.tanh(model.b(model.a(x)))
    h = h * 2 if h.sum().item() > 0 else model.c(h)
    return model.d(h).square().mean()


def at_first_call(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.a(x) if mark_of(x) == "a" else model.b(x)
    return model.d(torch.tanh(model.c(h))).square().mean()


def with_structure(model: nn.Module, x: Tensor, number: int) -> dict[str, Any]:
    h = model.b(model.a(x))
    loss = model.d(model.c(h)).square().mean()
    return {"loss": loss, "h": h} if mark_of(x) == "a" else {"loss": loss * 3, "h": h}


def counted(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """Each microbatch counts on from the one before, also where all leave their programs first."""
    h = torch.tanh(model.a(x))
    if number % 3 == 1:
        h = h.sin()
    model.count = getattr(model, "count", 0.0) + 1.0  # type: ignore[assignment]
    h = torch.tanh(model.c(torch.tanh(model.b(h * model.count))))  # type: ignore[operator]
    return model.d(h).square().mean()


def caught(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """A call that fails on one stage, which the step's code expects."""
    h = torch.tanh(model.b(model.a(x)))
    try:
        h = h.view(3, 3)
    except RuntimeError:
        h = h * 2
    return model.d(torch.tanh(model.c(h))).square().mean()


MARKS = marked("aaa", "aba", "aaa", "bab", "bbb", "aab")
LONG = marked("aaaaaa", "abacda", "dcbaaa", "aaaaaa")

_STEPS = {
    "other branch": (other_branch, MARKS),
    "other stage": (other_stage, LONG),
    "number of the step": (by_number, MARKS),
    "extra calls at the end": (extra_at_end, MARKS),
    "ends early": (ends_early, MARKS),
    "placed value": (by_value, MARKS),
    "first call": (at_first_call, MARKS),
    "results": (with_structure, MARKS),
    "counted": (counted, MARKS),
    "caught": (caught, MARKS),
}
_LAYOUTS = {"chain": HALVES, "ping-pong": ALTERNATING, "U shape": U_SHAPE}
TWO = {
    f"{what}, {layout}": Case(
        make=Chain, stages=stages, step=step, steps=steps, recorded=None,
        pipelines=("simple",) if layout == "U shape" else ("interleaved",),
    )
    for what, (step, steps) in _STEPS.items()
    for layout, stages in _LAYOUTS.items()
}  # fmt: skip
FOUR = {
    what: Case(make=Chain, stages=EACH, step=step, steps=steps, recorded=None)
    for what, (step, steps) in _STEPS.items()
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str]]:
    return run_ranks(run_cases, 2, TWO, timeout=120)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, str]]:
    return run_ranks(run_cases, 4, FOUR, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(TWO))
def test_two_stages_go_on_together(name: str, two_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in two_ranks] == [""] * 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(FOUR))
def test_four_stages_go_on_together(name: str, four_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in four_ranks] == [""] * 4
