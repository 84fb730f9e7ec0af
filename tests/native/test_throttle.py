"""The bound in Python, for groups whose backend has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.errors import CommunicationError
from lightning_smp.native.throttle import Throttle
from lightning_smp.weights.gradients import GradientReducer
from lightning_smp.weights.ownership import Ownership
from lightning_smp.weights.sharing import SharingGroups
from tests.support.launch import gloo_group, run_ranks


class Script:
    """Makes works that end by `ends`, after a number of looks or at a wait, and notes the order."""

    def __init__(self, *, polls: bool, looks: int = 3) -> None:
        self.polls = polls
        self.looks = looks
        self.in_flight: list[int] = []
        self.most = 0
        self.issued: list[int] = []
        self.waits = 0

    def start(self, number: int) -> Any:
        self.issued.append(number)
        self.in_flight.append(number)
        self.most = max(self.most, len(self.in_flight))
        return Work(self, number)


class Work(dist.Work):
    def __init__(self, script: Script, number: int) -> None:
        super().__init__()
        self.script = script
        self.number = number
        self.left = script.looks

    def is_completed(self) -> bool:
        if self.script.polls and self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.script.in_flight.remove(self.number)
        return self.script.polls and self.left == 0

    def wait(self, *timeout: object) -> bool:
        self.script.waits += 1
        if not self.script.polls and self.left > 0:
            self.left = 0
            self.script.in_flight.remove(self.number)
        return True


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_bound_and_order(limit: int, polls: bool) -> None:
    script = Script(polls=polls, looks=50)
    throttle = Throttle(limit, polls=polls)
    for number in range(20):
        throttle.issue(lambda number=number: script.start(number))  # type: ignore[misc]
    assert script.issued == list(range(20))
    assert script.most == limit
    found = throttle.counters()
    assert (found.issued, found.waited, found.max_in_flight) == (20, 20 - limit, limit)
    assert found.waited_s > 0


def test_waiting_reaches_the_work_once() -> None:
    script = Script(polls=False)
    throttle = Throttle(1, polls=False)
    first = throttle.issue(lambda: script.start(0))
    assert first is not None
    throttle.issue(lambda: script.start(1))  # waited for the first
    assert first.is_completed()
    assert first.wait()
    assert script.waits == 1


def test_wait_for_room_has_a_timeout() -> None:
    script = Script(polls=True, looks=10**9)
    throttle = Throttle(1, polls=True, timeout_s=0.05)
    throttle.issue(lambda: script.start(0))
    with pytest.raises(CommunicationError, match="SMP_NCCL_THROTTLE_LIMIT"):
        throttle.issue(lambda: script.start(1))


def _reduce(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(8)])
    with gloo_group():
        ownership = Ownership.whole(module)
        groups = SharingGroups(ownership, [[0, 1]], lambda ranks: dist.new_group(list(ranks)))
        reducer = GradientReducer(ownership, groups, bucket_bytes=4)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        reducer.start(None)
        for parameter in reversed(list(module.parameters())):
            reducer.ready(parameter)
        reducer.finish()
        (throttle,) = groups._throttles.values()
        found = throttle.counters()
        assert found.issued == 17  # a bucket for each parameter, and who has gradients
        assert 0 < found.max_in_flight <= 2
    return [p.grad.unique().item() for p in module.parameters()]  # type: ignore[union-attr]


def test_gradients_are_reduced_within_the_bound() -> None:
    env = {"LIGHTNING_SMP_NATIVE": "0", "SMP_NCCL_THROTTLE_LIMIT": "2"}
    for gradients in run_ranks(_reduce, 2, env=env):
        assert gradients == [3.0] * 16
