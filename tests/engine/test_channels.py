"""Tensors between stages: order, shapes, copies, what is left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smp.engine.channels import Channels
from lightning_smp.engine.control import Control
from lightning_smp.program import TensorSpec
from tests.support.launch import gloo_group, run_ranks

CPU = torch.device("cpu")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, True, False)


def _tensors() -> list[torch.Tensor]:
    return [
        torch.arange(6.0).view(2, 3), torch.tensor(3), torch.tensor([True, False]),
        torch.arange(12.0).view(3, 4).t(), torch.randn(5, dtype=torch.bfloat16), torch.ones(2)[1:],
        torch.full((2, 2), 1 + 2j), torch.ones(4, 4)[::2, ::2],
    ]  # fmt: skip


def _channels(world_size: int) -> Channels:
    ranks = tuple(range(world_size))
    return Channels(ranks, dist.new_group(list(ranks)), CPU)


def _traffic(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with gloo_group():
        torch.manual_seed(0)
        tensors = _tensors()
        channels = _channels(world_size)
        if rank == 0:
            for tensor in tensors * 2:
                channels.send(tensor, 1, copy=False)
            changed = torch.zeros(3)
            channels.send(changed, 1, copy=True)
            changed.fill_(9)
        else:
            for k, tensor in enumerate(tensors):
                channels.post(0, k, spec_of(tensor))
            order = [3, 0, 7, 1, 2, 6, 4, 5]  # another one than that of the sender
            taken = {key: channels.take(0, key) for key in order}
            found["equal"] = [torch.equal(taken[k], tensors[k]) for k in range(len(tensors))]
            for tensor in tensors:
                channels.post(0, "rest", spec_of(tensor))
            channels.drain()
            found["copied"] = channels.receive(0, spec_of(torch.zeros(3))).tolist()
        channels.finish()
        found["unfinished"] = len(channels._sends)
        found["both ways"] = _both_ways(channels, rank)
        found["agreed"] = _agreed(rank, world_size)
    return found


def _both_ways(channels: Channels, rank: int) -> list[float]:
    """Both send much before either receives: nothing blocks."""
    other = 1 - rank
    for k in range(40):
        channels.send(torch.full((1000,), float(k + 100 * rank)), other, copy=False)
    spec = spec_of(torch.zeros(1000))
    for k in range(40):
        channels.post(other, k, spec)
    sums = [float(channels.take(other, k)[0]) for k in range(40)]
    channels.finish()
    return sums


def _agreed(rank: int, world_size: int) -> list[Any]:
    ranks = tuple(range(world_size))
    control = Control(ranks, dist.new_group(list(ranks), backend="gloo"))
    long = "x" * 100_000
    return [
        control.agree([rank, None, torch.float32]),
        control.publish([rank, long] if rank == 1 else None, 1) == [1, long],
        control.agree("short" if rank else long)[0] == long,
    ]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_traffic, 2, timeout=60)


@pytest.mark.timeout(90)
def test_any_order_of_taking(found: list[dict[str, Any]]) -> None:
    assert found[1]["equal"] == [True] * 8


@pytest.mark.timeout(90)
def test_copy_is_what_was_sent(found: list[dict[str, Any]]) -> None:
    """After 8 tensors that nobody took were dropped."""
    assert found[1]["copied"] == [0, 0, 0]


@pytest.mark.timeout(90)
def test_sends_do_not_block_and_are_freed(found: list[dict[str, Any]]) -> None:
    assert [rank["unfinished"] for rank in found] == [0, 0]
    assert found[0]["both ways"] == [100.0 + k for k in range(40)]
    assert found[1]["both ways"] == [float(k) for k in range(40)]


@pytest.mark.timeout(90)
def test_control(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["agreed"] == [[[0, None, torch.float32], [1, None, torch.float32]], True, True]


def _shared(rank: int, world_size: int) -> list[int]:
    with gloo_group():
        channels = _channels(world_size)
        mine = torch.tensor([rank, 10 + rank], dtype=torch.uint8)
        channels.share(mine, 1)
        channels.finish()
        return mine.tolist()


def test_bytes_of_one_stage_come_to_all() -> None:
    assert run_ranks(_shared, 3) == [[1, 11]] * 3
