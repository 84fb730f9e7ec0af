"""What cannot give the numbers of one device is refused by name, on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.placed.random import seed_everywhere
from tests.placed.rig import Rig, caught, samples
from tests.placed.steps import HALVES, Chain, chain_loss
from tests.support.launch import gloo_group, run_ranks


class Changing(nn.Module):
    """A unit whose result changes its shape with the content of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[: 1 + (self.calls() > 4)]

    def calls(self) -> int:
        count: int = self.__dict__.get("_count", 0)
        self.__dict__["_count"] = count + 1
        return count


class Hidden(nn.Module):
    """A unit whose result no other rank can rebuild."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return {"out": x @ self.weight, "what": object()}


class ChangingChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = Changing()  # type: ignore[assignment]


class HiddenChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = Hidden()  # type: ignore[assignment]


def after(act: Callable[[Any, Tensor], Any]) -> Callable[..., Tensor]:
    """A step that does something to a placed tensor."""

    def step(model: Any, x: Tensor, number: int) -> Tensor:
        h = model.b(model.a(x))
        act(model, h)
        loss: Tensor = model.d(model.c(h)).square().mean()
        return loss

    return step


def keep(model: Any, x: Tensor, number: int) -> Tensor:
    h = model.b(model.a(x))
    if number == 1:
        h = h + model.kept
    model.kept = h
    loss: Tensor = model.d(model.c(h)).square().mean()
    return loss


def across_stages(model: Any, h: Tensor) -> None:
    torch.autograd.grad(model.c(h).sum(), h)


def grad_of_input(model: Any, x: Tensor, number: int) -> Tensor:
    """With respect to what all ranks have, part of whose gradient is another stage's."""
    x = x.clone().requires_grad_()
    y = model.d(model.c(model.b(model.a(x)))) * x.mean()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean()


def grad_around_a_stage(model: Any, x: Tensor, number: int) -> Tensor:
    """Both ends on one stage, but half of the gradient comes by way of the other."""
    h = model.b(model.a(x))
    y = model.b(model.d(model.c(h))) + h
    (gradient,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y.square().mean() + gradient.square().mean()


def input_grad_around_a_stage(model: Any, x: Tensor, number: int) -> Tensor:
    """The same with respect to what all ranks have."""
    x = x.clone().requires_grad_()
    y = model.b(model.d(model.c(model.b(model.a(x))))) + model.b(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean()


def backward_in_step(model: Any, h: Tensor) -> None:
    model.c(h).sum().backward()


def leak_by_closure(model: Any, x: Tensor, number: int) -> Tensor:
    """What a unit computes gets out behind the strategy's back."""
    found = [torch.zeros(2, 4)]
    original = torch.nn.functional.linear

    def linear(*args: Any) -> Tensor:
        found.append(original(*args))
        return found[-1] * 1

    torch.nn.functional.linear = linear  # type: ignore[assignment]
    try:
        h = model.b(model.a(x))
    finally:
        torch.nn.functional.linear = original
    loss: Tensor = model.d(model.c(h + found[-1])).square().mean()
    return loss


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str]] = {
    "deepcopy": (Chain, after(lambda m, h: copy.deepcopy(h)), "copy.deepcopy"),
    "deepcopy of a unit": (Chain, after(lambda m, h: copy.deepcopy(m.a)), "copy.deepcopy of 'a'"),
    "pickle": (Chain, after(lambda m, h: pickle.dumps(h)), "cannot be pickled"),
    "data_ptr": (Chain, after(lambda m, h: h.data_ptr()), "data_ptr"),
    "untyped_storage": (Chain, after(lambda m, h: h.untyped_storage()), "untyped_storage"),
    "as_strided": (Chain, after(lambda m, h: h.as_strided((2,), (1,))), "as_strided"),
    "retain_grad": (Chain, after(lambda m, h: h.retain_grad()), "retain_grad"),
    "number": (Chain, after(lambda m, h: h.storage_offset()), "storage_offset"),
    "grad across stages": (Chain, after(across_stages), "torch.autograd.grad between"),
    "grad of an input": (Chain, grad_of_input, "torch.autograd.grad between"),
    "grad around a stage": (Chain, grad_around_a_stage, "that others depend on in between"),
    "grad of an input around a stage": (
        Chain, input_grad_around_a_stage, "that others depend on in between"
    ),
    "backward": (Chain, after(backward_in_step), "automatic_optimization"),
    "strange result": (HiddenChain, chain_loss, "'b' returned a builtins.object"),
    "leaked by a closure": (Chain, leak_by_closure, "reached the step's code by a hook"),
}  # fmt: skip


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    messages = {}
    with gloo_group(60):
        for name, (make, step, _) in REFUSED.items():
            messages[name] = _message(_rig(make), step)
        messages["changing shape"] = _message(_rig(ChangingChain), chain_loss, 3)
        messages["kept over steps"] = _message(_rig(Chain), keep, 2)
        rig = _rig(Chain)
        result = rig.raw(chain_loss, samples(1, 2)[0])[0]
        messages["result used"] = caught(lambda: result + 1)
        messages["unit outside"] = caught(lambda: rig.module.d(torch.ones(2, 4)))
        messages["result shown"] = repr(result)
    return messages


def _rig(make: Callable[[], nn.Module]) -> Rig:
    seed_everywhere(11, torch.device("cpu"))
    return Rig(make(), HALVES, timeout_s=3)


def _message(rig: Rig, step: Callable[..., Any], num_steps: int = 1) -> str:
    return caught(lambda: [rig.train(step, part) for part in samples(num_steps, 2)])


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_ranks(_refusals, 2, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name: str, messages: list[dict[str, str]]) -> None:
    """The rank that meets it says so; the others may only have lost their peer."""
    said = [rank[name] for rank in messages]
    assert any(text.startswith("UnsupportedError") and REFUSED[name][2] in text for text in said)


@pytest.mark.timeout(150)
def test_changing_shape_names_the_unit(messages: list[dict[str, str]]) -> None:
    said = "\n".join(rank["changing shape"] for rank in messages)
    assert "CommunicationError" in said
    assert "unit 'b' returned" in said


@pytest.mark.timeout(150)
def test_value_kept_over_steps(messages: list[dict[str, str]]) -> None:
    assert all("was kept from another microbatch or step" in r["kept over steps"] for r in messages)


@pytest.mark.timeout(150)
def test_outside_of_a_step(messages: list[dict[str, str]]) -> None:
    for rank in messages:
        assert "outside of its step" in rank["result used"]
        assert rank["result shown"] == "PlacedTensor(shape=(), dtype=torch.float32, on stage 1)"
    said = messages[0]["unit outside"]
    assert "'d', which lives on stage 1, was called outside of a step" in said
