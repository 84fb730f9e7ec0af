"""Which optimizers update the parts of a tensor as they update the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_smp.weights.elementwise import is_elementwise

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


class Normed(optim.Optimizer):
    """Steps of a length that the norm of the whole parameter gives, as LARS takes them."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.norm() / parameter.grad.norm()
                parameter.sub_(group["rate"] * norm * parameter.grad)


class Wrapping(optim.SGD):
    """Cannot be made from parameters and options alone."""

    def __init__(self, params: Any, more: Any) -> None:
        super().__init__(params, lr=0.1)


def _answers(make: Make, ndim: int) -> set[bool | None]:
    parameter = nn.Parameter(torch.ones([3] * ndim))
    optimizer = make([parameter])
    before = torch.random.get_rng_state()
    group = optimizer.param_groups[0]
    answers = {is_elementwise(optimizer, group, parameter, dim) for dim in range(ndim)}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(value.any() for value in optimizer.state.get(parameter, {}).values())
    assert torch.equal(parameter, torch.ones([3] * ndim))
    return answers


BY_ELEMENT: list[Make] = [
    lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: optim.SGD(p, 0.0),
    lambda p: optim.Adam(p, amsgrad=True),
    lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    lambda p: optim.AdamW(p, fused=True),
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.NAdam,
]
BY_TENSOR: list[Make] = [
    optim.Adafactor,
    lambda p: optim.LBFGS(p, max_iter=3),
    lambda p: Normed(p, 0.1),
]


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("make", BY_ELEMENT)
def test_by_element(make: Make, ndim: int) -> None:
    assert _answers(make, ndim) == {True}


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("make", BY_TENSOR)
def test_by_tensor(make: Make, ndim: int) -> None:
    assert _answers(make, ndim) == {False}


def test_matrices_only() -> None:
    assert _answers(optim.Muon, 2) == {False}


def test_what_cannot_be_tried() -> None:
    assert _answers(lambda p: Wrapping(p, more=Tensor()), 2) == {None}
