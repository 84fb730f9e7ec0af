"""Calls that another rank runs: no placeholder or argument of theirs is that of another microbatch.

Placeholders are used again by later microbatches, and arguments are compared by identity first. The
tests see this from outside: whatever a step keeps, writes or varies, the numbers are those of one
device, or the step is refused by name.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.placed.random import seed_everywhere
from lightning_smp.placed.tensor import PlacedTensor
from tests.placed.passing_steps import (
    ARGUMENTS,
    CHANGES,
    MODES,
    OBJECTS,
    PATHS,
    VIEWS,
    Double,
    Taking,
    end,
    mark,
)
from tests.placed.rig import Case, Rig, caught, run_cases
from tests.placed.steps import ALTERNATING, EACH, HALVES, Chain
from tests.support.launch import gloo_group, run_ranks

_LAYOUTS = {"chain": HALVES, "ping-pong": ALTERNATING, "each": EACH}
_KINDS = {
    "arguments": (ARGUMENTS, Taking, ("chain",)),
    "paths": (PATHS, Taking, ("chain",)),
    "modes": (MODES, Double, ("chain",)),
    "plain": (CHANGES, Taking, ("chain",)),
    "views": (VIEWS, Double, ("chain",)),
    "objects": (OBJECTS, Double, ("chain", "ping-pong", "each")),
}


def steps(dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """A program is recorded, followed by some and left by others, recorded anew, followed.

    The digits are what `mark` finds in the microbatches.
    """
    generator = torch.Generator().manual_seed(8)
    found = []
    for marks in ("00", "0102", "00", "000"):
        step = [torch.rand(2, 4, generator=generator, dtype=dtype) for _ in marks]
        for x, digit in zip(step, marks, strict=True):
            x[0, 0] += int(digit)
        found.append(step)
    return found


def _cases(kinds: Any = _KINDS) -> dict[str, Case]:
    found = {}
    for kind, (those, make, layouts) in kinds.items():
        for name, step in those.items():
            single = name in ("autocast", "within_modes")
            for layout in layouts:
                found[f"{kind}: {name}, {layout}"] = Case(
                    make=Chain if single else make, stages=_LAYOUTS[layout], step=step,
                    steps=steps(torch.float32 if single else torch.float64), recorded=None,
                    pipelines=("interleaved",),
                )  # fmt: skip
    return found


CASES = _cases()
TWO = {name: case for name, case in CASES.items() if not name.endswith(", each")}
FOUR = {name: case for name, case in CASES.items() if name.endswith(", each")}


def _run(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(rank, world_size, TWO if world_size == 2 else FOUR)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str]]:
    return run_ranks(_run, 2, timeout=120)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, str]]:
    return run_ranks(_run, 4, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(TWO))
def test_two_stages(name: str, two_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in two_ranks] == [""] * 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(FOUR))
def test_four_stages(name: str, four_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in four_ranks] == [""] * 4


# Placeholders that are kept and used elsewhere.

Keep = Callable[[list[Any], Tensor], Any]


def _suspend(kept: list[Any], h: Tensor) -> None:
    def hold() -> Iterator[Tensor]:
        yield h
        yield h

    source = hold()
    next(source)
    kept.append(source)


def _catch(kept: list[Any], h: Tensor) -> None:
    try:
        raise ValueError
    except ValueError as error:
        kept.append(error)


def _set(kept: list[Any], h: Tensor) -> None:
    module = nn.Module()
    module.h = h
    kept.append(module)


_KEPT: dict[str, tuple[str, Keep, Callable[[Any], Tensor]]] = {
    "list": ("value", list.append, lambda held: held),
    "closure": ("value", lambda kept, h: kept.append(lambda: h), lambda held: held()),
    "default": ("value", lambda kept, h: kept.append(lambda h=h: h), lambda held: held()),
    "view": ("view", list.append, lambda held: held),
    "detached": ("detached", list.append, lambda held: held),
    "generator": ("value", _suspend, next),
    "traceback": ("value", _catch, lambda held: held.__traceback__.tb_frame.f_locals["h"]),
    "attribute": ("value", _set, lambda held: held.h),
}
_USED = {"same step": (1, 2), "next step": (2, 0)}
"""The step and the microbatch where what microbatch 0 of step 1 has kept is used."""


def _keeping(
    which: str, keep: Keep, release: Callable[[Any], Tensor], used: tuple[int, int]
) -> Any:
    count: dict[int, int] = {}
    kept: list[Any] = []

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        here = (number, count.get(number, 0))
        count[number] = here[1] + 1
        h = torch.tanh(model.a(x))
        made = {"value": h, "view": h[:, :], "detached": h.detach()}
        if here == (1, 0):
            keep(kept, made[which])
        if here == used:
            h = h + release(kept[0])
        return end(model, model.b(h) + made["view"] + made["detached"])

    return step


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    with gloo_group(60):
        for name, how in _KEPT.items():
            for when, used in _USED.items():
                seed_everywhere(11, torch.device("cpu"))
                rig = Rig(Double(), HALVES, timeout_s=3)
                found[f"{name}, {when}"] = _ending(rig, _keeping(*how, used))
    return found


def _ending(rig: Rig, step: Any) -> str:
    return caught(lambda: [rig.train(step, part) for part in (steps()[1], steps()[1], steps()[1])])


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_ranks(_refusals, 2, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("when", list(_USED))
@pytest.mark.parametrize("name", list(_KEPT))
def test_what_is_kept_is_refused_elsewhere(
    name: str, when: str, refusals: list[dict[str, str]]
) -> None:
    for rank in refusals:
        ending = rank[f"{name}, {when}"]
        assert ending.startswith("UnsupportedError")
        assert "was kept from another microbatch or step" in ending


# Other kinds of steps in between.


class Normed(Chain):
    """Units that compute otherwise in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]
        self.c = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]
        self.double()


def _normed(model: Any, x: Tensor, number: int) -> Tensor:
    h = model.b(torch.tanh(model.a(x)))
    scale = getattr(h, "tag", 1.0)
    h.tag = 3.0 + number
    return end(model, h * scale)


def _train_and_evaluate(rank: int, world_size: int, layout: str) -> list[str]:
    """What differs from one device, where every training step is between two of evaluation."""
    with gloo_group(60):
        seed_everywhere(11, torch.device("cpu"))
        torch.manual_seed(3)
        whole = Normed()
        rig = Rig(copy.deepcopy(whole), _LAYOUTS[layout])
        optimizer = torch.optim.SGD(whole.parameters(), 0.1)
        wrong = []
        for number, microbatches in enumerate(steps()):
            for training in (False, True, False):
                for module in (whole, rig.module):
                    module.train(training)
                expected = [_normed(whole, x, number) for x in microbatches]
                found = (rig.train if training else rig.evaluate)(_normed, microbatches)
                if not torch.allclose(torch.stack(found), torch.stack(expected).detach()):
                    wrong.append(f"step {number}, training {training}: {found} for {expected}")
                if training:
                    torch.stack(expected).mean().backward()
                    with torch.no_grad():
                        for parameter in rig.local().values():
                            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                            parameter.grad = None
                    optimizer.step()
                    optimizer.zero_grad()
    return wrong


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", ["chain", "ping-pong"])
def test_evaluation_between_training_steps(layout: str) -> None:
    assert run_ranks(_train_and_evaluate, 2, layout, timeout=50) == [[], []]


# What is left after a step.

_WIDTH = 64


class Wide(Chain):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, Given())


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) + mask


def _left_over(rank: int, world_size: int, layout: str) -> dict[str, Any]:
    """Counts, after some steps, what a step has made; a collection of cycles must not help."""
    plain: list[weakref.ref[Tensor]] = []

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        mask = torch.ones(_WIDTH, _WIDTH)
        plain.extend(map(weakref.ref, (x, mask)))
        h = model.b(model.a(x, mask), mask=mask)
        y = h.detach() if mark(x) else model.c(h[:, :], mask)
        return (model.d(y, mask) + h).square().mean()

    with gloo_group(60):
        seed_everywhere(11, torch.device("cpu"))
        rig = Rig(Wide(), _LAYOUTS[layout])
        counts = []
        gc.collect()
        gc.disable()
        for _ in range(3):
            for marks in ("00", "0000", "0100"):
                rig.train(step, [torch.full((_WIDTH, _WIDTH), float(m)) for m in marks])
            counts.append(sum(type(o) is PlacedTensor for o in gc.get_objects()))
        alive = [t for t in map(_call, plain) if t is not None]
        large = [
            tuple(o.shape)
            for o in gc.get_objects()
            if type(o) is Tensor and o.numel() == _WIDTH * _WIDTH and o.is_floating_point()
        ]
        gc.enable()
    return {"plain": len(alive), "large": large, "placeholders": counts}


def _call(reference: weakref.ref[Tensor]) -> Tensor | None:
    return reference()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", ["chain", "ping-pong"])
def test_nothing_of_a_microbatch_outlives_its_step(layout: str) -> None:
    for found in run_ranks(_left_over, 2, layout, timeout=50):
        assert found["plain"] == 0
        assert found["large"] == []
        first, *later = found["placeholders"]
        assert set(later) == {later[0]}, "more placeholders from step to step"
        assert first < 60
