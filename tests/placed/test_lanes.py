"""Lanes of microbatches: whose numbers they keep, and what they are given before a step's code."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_smp.placed.random import seed_everywhere
from lightning_smp.placed.route import Route
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.program import Entry, Leaf, Outcome, Program, TensorSpec
from tests.placed.rig import Rig, samples
from tests.placed.steps import ALTERNATING, Chain
from tests.support.launch import gloo_group, run_ranks

_ALL_HERE = {"a": 1, "b": 1, "c": 1, "d": 0}


def _alive_while_running(rank: int, world_size: int, grad: bool) -> list[int]:
    """After each unit, how many of this rank's tensors that the step has made are alive."""
    made: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def note(h: Any) -> None:
        local = h._value.local if type(h) is PlacedTensor else h
        if local is not None:
            made.append(weakref.ref(local))
        del local
        counts.append(sum(r() is not None for r in made))

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        h = x
        for unit in (model.a, model.b, model.c):
            h = unit(h)
            note(h)
            if grad:
                h = h.detach()
        return model.d(h).square().mean()

    with gloo_group(60):
        seed_everywhere(3, torch.device("cpu"))
        rig = Rig(Chain(), _ALL_HERE)
        run = rig.train if grad else rig.evaluate
        for microbatches in samples(2, 2):
            run(step, microbatches)
        made.clear()
        counts.clear()
        gc.collect()
        gc.disable()
        (microbatches,) = samples(1, 3)
        run(step, microbatches)
        gc.enable()
        counts.append(sum(r() is not None for r in made))
    return counts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("grad", [False, True])
def test_a_lane_keeps_no_numbers_that_the_step_has_dropped(grad: bool) -> None:
    passing, owning = run_ranks(_alive_while_running, 2, grad, timeout=50)
    assert max(owning[:-1]) <= 2, owning  # what a unit was given and what it gave
    assert owning[-1] == 0
    assert max(passing) <= 1


def _weakly_held(rank: int, world_size: int) -> list[bool]:
    seen: list[bool] = []

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        h = model.a(x)
        reference = weakref.ref(h)
        h = model.b(h)
        h = model.c(h)
        seen.append(reference() is None)
        return model.d(h).square().mean()

    with gloo_group(60):
        seed_everywhere(3, torch.device("cpu"))
        rig = Rig(Chain(), _ALL_HERE)
        for microbatches in samples(3, 2):
            rig.train(step, microbatches)
    return seen


@pytest.mark.timeout(60)
def test_a_weak_reference_ends_with_the_steps_own_references() -> None:
    _, owning = run_ranks(_weakly_held, 2, timeout=50)
    assert all(owning), owning


def _ping_pong(rank: int, world_size: int) -> list[int]:
    """Placeholders are used again: how many there are after each step."""

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        h = model.d(model.c(model.b(model.a(x))))
        return (h * 2).square().mean()

    counts = []
    with gloo_group(60):
        seed_everywhere(3, torch.device("cpu"))
        rig = Rig(Chain(), ALTERNATING)
        for microbatches in samples(5, 3):
            rig.train(step, microbatches)
            gc.collect()
            counts.append(sum(type(o) is PlacedTensor for o in gc.get_objects()))
    return counts


@pytest.mark.timeout(60)
def test_lanes_do_not_grow() -> None:
    for _, _, *later in run_ranks(_ping_pong, 2, timeout=50):
        assert set(later) == {later[0]}, later


def _route() -> Route:
    spec = TensorSpec((2,), (1,), torch.float32, True, True)
    key = (("unit", 0, 0), 1, ("tuple", ("t", (2,), torch.float32, False)), ())
    entry = Entry(key, 0, Outcome(["t", 0], (Leaf(spec),)), (), ())
    program = Program(entries=[entry], segments=[(0, 0)], num_values=1)
    program.seal()
    return Route(program, 1, {0: object()})  # type: ignore[dict-item]


def test_inputs_are_in_the_lane_before_the_step_where_an_earlier_one_gave_them_to_a_call() -> None:
    route, first, second = _route(), torch.zeros(2), torch.ones(2)
    lane = route.enter([first], {})
    assert not any(item is first for item in lane), "nothing is known before the first one"
    lane[-2] = first  # the place of the call's argument, filled when it has been looked at
    route.finish(lane, [first])
    route.leave(lane)
    assert not any(item is first for item in lane)
    assert route.enter([second], {})[-2] is second


@pytest.mark.parametrize("kind", ["parameter", "held by a stage"])
def test_inputs_that_are_not_on_all_stages_are_not(kind: str) -> None:
    route, first = _route(), torch.zeros(2)
    lane = route.enter([first], {})
    lane[-2] = first
    route.finish(lane, [first])
    other = torch.nn.Parameter(torch.ones(2)) if kind == "parameter" else torch.ones(2)
    held = {id(other): 0} if kind != "parameter" else {}
    assert not any(item is other for item in route.enter([other], held))
