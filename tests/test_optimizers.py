"""The fused optimizers against the formulas of their papers, computed number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.optimizers import FusedAdam, FusedLAMB, FusedLamb, FusedNovoGrad

STEPS = 5
Vector = list[float]
Rule = Callable[[int, Vector, Vector, dict[str, Any]], Vector]


def length(x: Vector) -> float:
    return math.sqrt(sum(v * v for v in x))


def adam_direction(
    t: int, w: Vector, g: Vector, held: dict[str, Any], *, eps: float, decay: float,
    b1: float = 0.9, b2: float = 0.999,
) -> Vector:  # fmt: skip
    held["m"] = [b1 * m + (1 - b1) * x for m, x in zip(held.get("m", [0] * 9), g, strict=False)]
    held["v"] = [b2 * v + (1 - b2) * x * x for v, x in zip(held.get("v", [0] * 9), g, strict=False)]
    c1, c2 = 1 - b1**t, 1 - b2**t
    return [
        (m / c1) / (math.sqrt(v / c2) + eps) + decay * x
        for m, v, x in zip(held["m"], held["v"], w, strict=True)
    ]


def adam(t: int, w: Vector, g: Vector, held: dict[str, Any]) -> Vector:
    return adam_direction(t, w, g, held, eps=1e-8, decay=0.1)


def lamb(t: int, w: Vector, g: Vector, held: dict[str, Any]) -> Vector:
    direction = adam_direction(t, w, g, held, eps=1e-6, decay=0.1)
    ratio = length(w) / length(direction)
    return [ratio * d for d in direction]


def novograd(t: int, w: Vector, g: Vector, held: dict[str, Any]) -> Vector:
    square = length(g) ** 2
    held["v"] = square if t == 1 else 0.95 * held["v"] + 0.05 * square
    scaled = [x / (math.sqrt(held["v"]) + 1e-8) + 0.1 * y for x, y in zip(g, w, strict=True)]
    held["m"] = [0.9 * m + x for m, x in zip(held.get("m", [0] * 9), scaled, strict=False)]
    return held["m"]


CASES: dict[str, tuple[Callable[..., Any], Rule]] = {
    "adam": (lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1), adam),
    "lamb": (lambda p: FusedLAMB(p, lr=0.1, weight_decay=0.1, max_grad_norm=0), lamb),
    "novograd": (
        lambda p: FusedNovoGrad(
            p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, bias_correction=False,
            reg_inside_moment=True, grad_averaging=False,
        ),
        novograd,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_formula(name: str) -> None:
    make, rule = CASES[name]
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
    weights = [tensor.tolist() for tensor in tensors]
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    held: list[dict[str, Any]] = [{}, {}]
    optimizer = make(parameters)
    for t in range(1, STEPS + 1):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn(3, generator=generator, dtype=torch.float64)
            update = rule(t, weights[index], parameter.grad.tolist(), held[index])
            weights[index] = [w - 0.1 * u for w, u in zip(weights[index], update, strict=True)]
        optimizer.step()
    for parameter, expected in zip(parameters, weights, strict=True):
        torch.testing.assert_close(
            parameter.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9
        )


def trained(make: Callable[..., Any], steps: int = STEPS, **torch_options: Any) -> torch.Tensor:
    torch.manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    optimizer = make([parameter], **torch_options)
    for _ in range(steps):
        optimizer.zero_grad()
        (parameter.sin() * torch.arange(4)).sum().backward()
        optimizer.step()
    return parameter.detach()


def test_adam_is_that_of_torch() -> None:
    decayed = trained(FusedAdam, lr=0.1, weight_decay=0.1)
    torch.testing.assert_close(decayed, trained(torch.optim.AdamW, lr=0.1, weight_decay=0.1))
    in_gradient = trained(FusedAdam, lr=0.1, weight_decay=0.1, adam_w_mode=False)
    torch.testing.assert_close(in_gradient, trained(torch.optim.Adam, lr=0.1, weight_decay=0.1))


def test_lamb_limits_the_norm_of_all_gradients() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value, 0.0])
    FusedLAMB(parameters, max_grad_norm=1.0).step()
    torch.testing.assert_close(parameters[0].grad[0], torch.tensor(0.6))
    torch.testing.assert_close(parameters[1].grad[0], torch.tensor(0.8))


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_state_goes_on_after_loading(make: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    first = torch.nn.Parameter(torch.randn(4))
    second = torch.nn.Parameter(first.detach().clone())
    one, other = make([first], weight_decay=0.1), make([second], weight_decay=0.1)
    gradients = torch.randn(4, 4)
    for step, gradient in enumerate(gradients):
        if step == 2:
            fresh = make([second], weight_decay=0.1)
            fresh.load_state_dict(other.state_dict())
            other = fresh
        for parameter, optimizer in ((first, one), (second, other)):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_no_gradient_and_closure() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for make in (FusedAdam, FusedLAMB, FusedNovoGrad):
        assert make([parameter]).step(lambda: 3.0) == 3.0
    assert parameter.tolist() == [1.0, 1.0]
    assert FusedLamb is FusedLAMB


def test_refusals() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for make in (FusedAdam, FusedLAMB, FusedNovoGrad):
        with pytest.raises(UnsupportedError, match="amsgrad"):
            make([parameter], amsgrad=True)
        with pytest.raises(ConfigError, match="lr=-1"):
            make([parameter], lr=-1)
        with pytest.raises(ConfigError, match="betas"):
            make([parameter], betas=(1.0, 0.9))
    with pytest.raises(UnsupportedError, match="norm_type"):
        FusedNovoGrad([parameter], norm_type=0)
