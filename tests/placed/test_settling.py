"""The end of a step: the ranks meet once, and the small numbers that are asked for come along."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.errors import CommunicationError
from lightning_smp.placed.random import seed_everywhere
from lightning_smp.placed.structure import iter_tensors
from tests.placed.rig import Rig, samples
from tests.placed.steps import HALVES, Chain
from tests.support.launch import gloo_group, run_ranks

Step = Callable[[nn.Module, Tensor, int], Any]

_NUM_GOOD = 2
"""Steps that run alike on all ranks before the one that is looked at."""


def few(model: nn.Module, x: Tensor, number: int) -> Any:
    out = model(x)
    return {"loss": out.square().mean(), "first": out[0, 0] > 0, "batch": x.sum()}


def many(model: nn.Module, x: Tensor, number: int) -> Any:
    out = model(x)
    return {"loss": out.square().mean(), "all": torch.cat([out] * 100)}


def other_path(model: nn.Module, x: Tensor, number: int) -> Any:
    out = model(x)
    if number == _NUM_GOOD:
        out = out.sin()
    return {"loss": out.square().mean()}


def one_draws(model: nn.Module, x: Tensor, number: int) -> Any:
    if number == _NUM_GOOD and torch.distributed.get_rank() == 1:
        random.random()
    return {"loss": model(x).square().mean()}


def _steps(rank: int, world_size: int) -> dict[str, Any]:
    with gloo_group():
        return {step.__name__: _step(step) for step in (few, many, other_path, one_draws)}


def _step(step: Step) -> Any:
    """What the last step gave, and the messages that its end took: (meetings, words, numbers)."""
    torch.manual_seed(3)
    rig = Rig(Chain(), HALVES)
    seed_everywhere(9, torch.device("cpu"))
    counts = dict.fromkeys(("meet_at", "agree_at", "share"), 0)
    for name in counts:
        _count(rig.control, name, counts)

    def wanted(results: list[Any]) -> list[Tensor]:
        return list(iter_tensors(results))

    for microbatches in samples(_NUM_GOOD, 3):
        rig.train(step, microbatches, wanted=wanted)
    before = dict(counts)
    try:
        results = rig.train(step, samples(1, 3)[0], wanted=wanted)
    except CommunicationError as error:
        return str(error)
    return [*iter_tensors(results)], {name: counts[name] - before[name] for name in counts}


def _count(control: Any, name: str, counts: dict[str, int]) -> None:
    method = getattr(control, name)

    def counting(*args: Any) -> Any:
        counts[name] += 1
        return method(*args)

    setattr(control, name, counting)


def _whole(step: Step) -> list[Tensor]:
    torch.manual_seed(3)
    model = Chain()
    return [*iter_tensors([step(model, x, _NUM_GOOD) for x in samples(1, 3)[0]])]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_steps, 2, timeout=60)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("step", "messages"),
    [
        (few, {"meet_at": 1, "agree_at": 0, "share": 0}),
        (many, {"meet_at": 1, "agree_at": 0, "share": 1}),
    ],
)
def test_numbers_and_messages_of_a_followed_step(
    step: Step, messages: dict[str, int], found: list[dict[str, Any]]
) -> None:
    for numbers, counted in (rank[step.__name__] for rank in found):
        for number, whole in zip(numbers, _whole(step), strict=True):
            torch.testing.assert_close(number, whole.detach())
        assert counted == messages


@pytest.mark.timeout(90)
def test_a_deviation_is_said_in_words(found: list[dict[str, Any]]) -> None:
    for numbers, counted in (rank["other_path"] for rank in found):
        for number, whole in zip(numbers, _whole(other_path), strict=True):
            torch.testing.assert_close(number, whole.detach())
        assert counted["meet_at"] == 0
        assert counted["agree_at"] > 1  # at the end of the schedule, and call by call
        assert counted["share"] == 1


@pytest.mark.timeout(90)
def test_draws_of_one_rank_are_seen(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "drew different random numbers" in rank["one_draws"]
