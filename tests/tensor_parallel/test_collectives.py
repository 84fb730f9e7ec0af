"""The collectives against what one process computes, with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_smp.tensor_parallel import collectives as c
from lightning_smp.tensor_parallel import operations as ops
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.record import split_sizes
from tests.support.launch import gloo_group, run_ranks

_UNEVEN = 5


def _parts(full: torch.Tensor, dim: int, ranks: int) -> list[torch.Tensor]:
    return list(full.split(list(split_sizes(full.shape[dim], ranks)), dim))


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_()


def _check_gather(tp: TensorParallel, dim: int) -> None:
    full = torch.randn(4, _UNEVEN, 3, dtype=torch.float64)
    weights = torch.randn(tp.size, 4, _UNEVEN, 3, dtype=torch.float64)
    sizes = split_sizes(full.shape[dim], tp.size)
    for summed in (True, False):
        own = _leaf(_parts(full, dim, tp.size)[tp.rank])
        joined = c.gather(own, tp, dim, sizes, sum_gradient=summed)
        assert torch.equal(joined, full)
        (joined * weights[tp.rank]).sum().backward()
        seen = weights.sum(0) if summed else weights[tp.rank]
        torch.testing.assert_close(own.grad, _parts(seen, dim, tp.size)[tp.rank])


def _check_scatter(tp: TensorParallel, dim: int) -> None:
    summands = torch.randn(tp.size, 4, _UNEVEN, 3, dtype=torch.float64)
    weights = torch.randn(4, _UNEVEN, 3, dtype=torch.float64)
    own = _leaf(summands[tp.rank])
    result = c.scatter_sum(own, tp, dim)
    torch.testing.assert_close(result, _parts(summands.sum(0), dim, tp.size)[tp.rank])
    (result * _parts(weights, dim, tp.size)[tp.rank]).sum().backward()
    torch.testing.assert_close(own.grad, weights)
    sliced_from = _leaf(summands[0])
    part = c.own_slice(sliced_from, tp, dim)
    assert torch.equal(part, _parts(summands[0], dim, tp.size)[tp.rank])
    (part * _parts(weights, dim, tp.size)[tp.rank]).sum().backward()
    torch.testing.assert_close(sliced_from.grad, weights)


def _check_exchange(tp: TensorParallel) -> None:
    samples = torch.randn(2 * tp.size, 3, _UNEVEN, dtype=torch.float64)
    weights = torch.randn_like(samples)
    mine = slice(2 * tp.rank, 2 * tp.rank + 2)
    own = _leaf(samples[mine])
    everybody = c.exchange(own, tp, split_dim=-1, join_dim=0)
    assert torch.equal(everybody, _parts(samples, -1, tp.size)[tp.rank])
    back = c.exchange(everybody, tp, split_dim=0, join_dim=-1, join=split_sizes(_UNEVEN, tp.size))
    assert torch.equal(back, samples[mine])
    (back * weights[mine]).sum().backward()
    torch.testing.assert_close(own.grad, weights[mine])


def _check_sums(tp: TensorParallel) -> None:
    summands = torch.randn(tp.size, 3, dtype=torch.float64)
    own = _leaf(summands[tp.rank])
    total = c.reduce_out(own, tp)
    torch.testing.assert_close(total, summands.sum(0))
    total.sum().backward()
    torch.testing.assert_close(own.grad, torch.ones_like(own))
    shared = _leaf(summands[0])
    copied = c.copy_in(shared, tp)
    (copied * summands[tp.rank]).sum().backward()
    torch.testing.assert_close(shared.grad, summands.sum(0))


def _check_operators(tp: TensorParallel) -> None:
    x = torch.randn(4, _UNEVEN, requires_grad=True)
    even, uneven = [4] * tp.size, list(split_sizes(_UNEVEN, tp.size))
    place = (tp.rank, tp.group_name)
    calls = [
        (ops.all_gather, (x, 0, even, *place)),
        (ops.reduce_scatter, (x, 1, uneven, *place)),
        (ops.all_reduce, (x, tp.group_name)),
        (ops.all_to_all, (x, 1, uneven, 0, even, *place)),
    ]
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=_OPCHECKS)
        real = operator(*args)
        with FakeTensorMode() as mode:
            fake = operator(mode.from_tensor(x), *args[1:])
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert ops.communicated_bytes(operator, args, real) > 0
    assert ops.communicated_bytes(torch.ops.aten.add, (x, x), x) == 0


_OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def _rank(rank: int, world_size: int) -> None:
    with gloo_group():
        tp = TensorParallel.over(dist.group.WORLD)
        for dim in range(3):
            torch.manual_seed(dim)
            _check_gather(tp, dim)
            _check_scatter(tp, dim)
        torch.manual_seed(9)
        _check_exchange(tp)
        _check_sums(tp)
        torch.manual_seed(10 + rank)
        _check_operators(tp)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_right_and_differentiable(world_size: int) -> None:
    run_ranks(_rank, world_size)


def test_one_rank_needs_no_group_and_no_operation() -> None:
    tp = TensorParallel()
    x = torch.randn(2, 3)
    assert c.gather(x, tp, 0) is x
    assert c.scatter_sum(x, tp, 0) is x
    assert c.own_slice(x, tp, 1) is x
    assert c.exchange(x, tp, split_dim=1, join_dim=0) is x
    assert c.copy_in(x, tp) is x
    assert c.reduce_out(x, tp) is x


def test_analysis_needs_no_processes() -> None:
    tp = TensorParallel("absent", rank=1, size=4)
    with FakeTensorMode():
        x = torch.empty(2, 3, 10, requires_grad=True)
        assert c.gather(x, tp, 0).shape == (8, 3, 10)
        y = c.exchange(x, tp, split_dim=-1, join_dim=0)
        assert y.shape == (8, 3, 3)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
