"""Ranks that run different code: an error by name on every rank, and nobody hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.placed.random import seed_everywhere
from tests.placed.rig import Rig, samples
from tests.placed.steps import ALTERNATING, HALVES, Chain, chain_loss
from tests.support.launch import gloo_group, run_ranks


@dataclass(frozen=True)
class Ending:
    """How a step ended on one rank."""

    kind: str
    message: str
    seconds: float


def other_function(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))
    h = torch.sin(h) if dist.get_rank() == number % 2 else torch.cos(h)
    return model.d(model.c(h)).square().mean()


def other_unit(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.a(x) if dist.get_rank() == 0 else model.c(x)
    return h.square().mean()


def other_slice(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))[: 1 + dist.get_rank()]
    return model.d(model.c(h)).square().mean()


def extra_call(model: nn.Module, x: Tensor, number: int) -> Tensor:
    loss = chain_loss(model, x, number)
    return loss + 1 if dist.get_rank() == 0 else loss


def one_reads(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))
    if dist.get_rank() == 1:
        h.sum().item()
    return model.d(model.c(h)).square().mean()


def one_draws(model: nn.Module, x: Tensor, number: int) -> Tensor:
    if dist.get_rank() == 1:
        torch.rand(1)
    return chain_loss(model, x, number)


def both_leave_elsewhere(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.a(x)
    h = h.sin() if dist.get_rank() == 0 else h
    h = model.b(h)
    h = h.sin() if dist.get_rank() == 1 else h
    return model.d(model.c(h)).square().mean()


def after_leaving(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """All leave the program at one call, and differ after that."""
    h = model.b(model.a(x).sin())
    return other_function(model, h, number)


def raises_on_one(model: nn.Module, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))
    if dist.get_rank() == 1:
        raise ValueError("stage one is unwell")
    return model.d(model.c(h)).square().mean()


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (other_function, other_unit, other_slice, extra_call, one_reads, one_draws,
                 both_leave_elsewhere, after_leaving)
}  # fmt: skip
_LAYOUTS = {"chain": HALVES, "ping-pong": ALTERNATING}


def _run(rank: int, world_size: int, names: list[str], good_steps: int) -> dict[str, Ending]:
    """Good steps first, if any; then one in which the ranks differ."""
    endings = {}
    with gloo_group(60):
        for name in names:
            for layout, stages in _LAYOUTS.items():
                seed_everywhere(11, torch.device("cpu"))
                torch.manual_seed(3)
                rig = Rig(Chain(), stages, timeout_s=8)
                steps = samples(good_steps + 1, 3)
                for microbatches in steps[:-1]:
                    rig.train(chain_loss, microbatches)
                endings[f"{name}, {layout}"] = _ending(rig, STEPS[name], steps[-1])
                dist.barrier()
    return endings


def _ending(rig: Rig, step: Callable[..., Any], microbatches: list[Tensor]) -> Ending:
    start = time.monotonic()
    try:
        rig.train(step, microbatches)
    except Exception as error:
        return Ending(type(error).__name__, str(error), time.monotonic() - start)
    return Ending("", "", time.monotonic() - start)


def _names(good_steps: int, names: list[str]) -> list[Any]:
    return [(good_steps, f"{name}, {layout}") for name in names for layout in _LAYOUTS]


FOLLOWED = list(STEPS)
RECORDED = list(STEPS)


@pytest.fixture(scope="module")
def endings() -> dict[int, list[dict[str, Ending]]]:
    return {
        1: run_ranks(_run, 2, FOLLOWED, 1, timeout=120),
        0: run_ranks(_run, 2, RECORDED, 0, timeout=120),
    }


@pytest.mark.timeout(250)
@pytest.mark.parametrize(("good_steps", "name"), [*_names(1, FOLLOWED), *_names(0, RECORDED)])
def test_every_rank_is_told_at_once(
    good_steps: int, name: str, endings: dict[int, list[dict[str, Ending]]]
) -> None:
    for ending in (rank[name] for rank in endings[good_steps]):
        assert ending.kind == "CommunicationError"
        assert "the stages " in ending.message
        assert "Draw from torch" in ending.message or "stage 1: " in ending.message
        assert ending.seconds < 4
