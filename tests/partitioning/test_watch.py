"""A backward's kernels and memory belong to the atom whose forward they answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_smp.partitioning import Analysis, analyze, fake_batch, find_atoms, new_fake_mode
from lightning_smp.partitioning.device import Kernel

_BATCH, _WIDTH = 32, 16
_ROWS = 4 * _BATCH * _WIDTH
"""Bytes of one activation."""


def run(root: nn.Module, step: Any) -> Analysis:
    mode = new_fake_mode()
    fake = fake_batch(torch.zeros(_BATCH, _WIDTH), mode)
    found = analyze(root, lambda copy: step(copy, fake), find_atoms(root), mode=mode)
    assert found.reason is None
    return found


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))


def products(kernels: tuple[Kernel, ...]) -> int:
    return sum(kernel.kind == "product" for kernel in kernels)


def test_products_come_back_once_for_each_gradient() -> None:
    work = run(layers(), lambda net, x: net(x).sum()).work
    assert [products(work[name].forward) for name in "012"] == [1, 1, 1]
    assert [products(work[name].backward) for name in "012"] == [1, 2, 2]
    # The bias's gradient is a sum over rows; the last layer's backward begins with the loss's.
    assert [k.kind for k in work["1"].backward].count("rows") == 1


def test_a_backward_of_the_step_itself_counts_once() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    own = run(layers(), step)
    assert own.work == run(layers(), lambda net, x: net(x).sum()).work


def test_without_a_backward_one_is_presumed() -> None:
    def silent(net: nn.Module, x: Tensor) -> None:
        net(x).sum()

    work = run(layers(), silent).work
    assert [products(work[name].backward) for name in "012"] == [1, 2, 2]

    def failing(net: nn.Module, x: Tensor) -> Tensor:
        out = net(x)
        out.register_hook(lambda gradient: gradient * float(gradient.sum()))
        return out.sum()

    assert run(layers(), failing).work == work | {"2": run(layers(), failing).work["2"]}


def test_parameters_outside_of_the_copy_get_no_gradients() -> None:
    outside = nn.Linear(_WIDTH, _WIDTH)
    work = run(layers(1), lambda net, x: outside(net(x)).sum()).work
    assert outside.weight.grad is None
    assert products(work["0"].backward) == 3  # presumed: one for the first, two for the outer one


def test_the_loss_of_a_mapping_is_what_comes_back() -> None:
    def step(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        hidden = net[0](x)
        return {"loss": hidden.sum(), "other": net[1](hidden)}

    work = run(layers(2), step).work
    assert products(work["0"].backward) == 1
    assert work["1"].backward == ()


def test_gradients_within_the_step_are_not_its_backward() -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        return slope.square().sum()

    work = run(layers(), step).work
    assert products(work["0"].backward) >= 3  # of the input, and of both factors of that


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_are_part_of_the_backward(reentrant: bool) -> None:
    def step(net: nn.Module, x: Tensor) -> Tensor:
        x = net[0](x)
        x = checkpoint(lambda y: net[1](y).sin(), x, use_reentrant=reentrant)
        return net[2](x).sum()

    found = run(layers(), step)
    assert found.order == ("0", "1", "2")
    assert products(found.work["1"].forward) == 1
    assert products(found.work["1"].backward) == 3


def test_saved_and_temporary_bytes() -> None:
    """GELU saves what it is given, a layer what it is given; gradients are temporary."""
    root = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))
    work = run(root, lambda net, x: net(x).sum()).work
    assert [work[name].saved_bytes for name in "012"] == [_ROWS] * 3
    weight = 4 * _WIDTH * _WIDTH
    # In GELU's backward the gradients of its result and of its input.
    assert work["1"].temporary_bytes == pytest.approx(2 * _ROWS, abs=64)
    # In a layer's that of its input (a sum's is one number), and its weight's for a while.
    assert _ROWS <= work["2"].temporary_bytes <= _ROWS + 2 * weight + 128


def test_a_view_keeps_its_whole_storage() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, 3 * _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, :_WIDTH].exp().sin()

    root = nn.Sequential(Part())
    work = run(root, lambda net, x: net(x).sum()).work["0"]
    assert work.saved_bytes == _ROWS + _ROWS  # of the input, and exp's result

    class Whole(Part):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, :_WIDTH].sin()

    root = nn.Sequential(Whole())
    work = run(root, lambda net, x: net(x).sum()).work["0"]
    assert work.saved_bytes == _ROWS + 3 * _ROWS


class Experts(nn.Module):
    """A matrix for each group of rows, as Hugging Face's mixtures of experts have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16, 24, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(2, 10, 2, dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch has no grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_are_counted(dtype: torch.dtype) -> None:
    root = nn.Sequential(Experts(dtype), nn.Linear(24, 3, dtype=dtype))
    mode = new_fake_mode()
    batch = fake_batch(torch.zeros(8, 16, dtype=dtype, requires_grad=True), mode)
    found = analyze(root, lambda net: net(batch).sin().sum(), find_atoms(root), mode=mode)
    assert found.reason is None
    product = 2 * 8 * 16 * 24
    work = found.work["0"]
    assert sum(kernel.flops for kernel in work.forward) == product
    assert sum(kernel.flops for kernel in work.backward) == 2 * product
