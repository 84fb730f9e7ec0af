"""A script that goes on after an error has left a step: with equal numbers, or told why not."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from tests.support.launch import run_ranks, run_ranks_expect_failure

pytestmark = pytest.mark.timeout(150)

_WORDS = "the user's own words"
_TIMEOUT_S = 60.0  # of the run, far above the bound
_BOUND_S = 35.0  # generous, for busy machines; who does not meet the error has ten seconds
_STEPS = 6
_BATCH, _FEATURES = 8, 4


class Fault:
    """Where it goes wrong at the moment, and on which rank; None for all."""

    def __init__(self) -> None:
        self.where: str | None = None
        self.rank: int | None = None

    def __call__(self, where: str) -> None:
        if where == self.where and self.rank in (None, smp.rank()) and not smp.is_tracing():
            raise ValueError(_WORDS)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fault("backward")
        return gradients[0], None


class Unit(nn.Module):
    """A unit that goes wrong where it is computed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(_FEATURES))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.fault("unit")
        found: Tensor = _InBackward.apply(x @ self.weight, self.fault)
        return found


def _net(fault: Fault) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(_FEATURES, _FEATURES) for _ in range(3)]
    return nn.Sequential(*layers, Unit(fault)).double()


def _batch(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(_BATCH, _FEATURES, dtype=torch.float64)


class _Script:
    """What every rank runs."""

    def __init__(self, config: dict[str, Any]) -> None:
        smp.init({"microbatches": 2, "timeout": _TIMEOUT_S, **config})
        self.fault = Fault()
        self.model = smp.DistributedModel(_net(self.fault))
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        @smp.step
        def train(x: Tensor) -> Any:
            self.fault("before")
            loss = self.model(x).pow(2).mean()
            self.fault("after")
            self.model.backward(loss)
            self.fault("end")
            return loss

        self._train = train

    def train(self, number: int) -> float:
        self.optimizer.zero_grad()
        share = slice(smp.dp_rank(), None, smp.dp_size())
        loss: Tensor = self._train(_batch(number)[share]).reduce_mean()
        self.optimizer.step()
        return float(loss)


def _weights_on_one_device(failing: int) -> dict[str, Tensor]:
    net = _net(Fault())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(_STEPS):
        if number != failing:
            optimizer.zero_grad()
            net(_batch(number)).pow(2).mean().backward()
            optimizer.step()
    return dict(net.state_dict())


def _goes_on(
    rank: int, size: int, where: str, failing: int, config: dict[str, Any]
) -> dict[str, Tensor]:
    script = _Script(config)
    for number in range(_STEPS):
        script.fault.where = where if number == failing else None
        if number == failing:
            with pytest.raises((ValueError, smp.SMPError), match=_WORDS):
                script.train(number)
            if number == _STEPS - 1:
                smp.barrier()  # another call may be the next
        else:
            script.train(number)
    return dict(script.model.state_dict())


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        ("before", 0), ("before", 3), ("after", 0), ("after", 3), ("end", 3), ("unit", 0),
        ("before", _STEPS - 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("size", "config"),
    [(2, {"partitions": 2}), (2, {"partitions": 1}), (4, {"partitions": 2})],
    ids=["pp2", "dp2", "pp2-dp2"],
)
def test_all_ranks_go_on_after_the_same_error(
    where: str, failing: int, size: int, config: dict[str, Any]
) -> None:
    found, *_ = run_ranks(_goes_on, size, where, failing, config, timeout=90)
    for name, value in _weights_on_one_device(failing).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def _until_refused(
    rank: int, size: int, where: str, at: int | None, failing: int, then: str
) -> None:
    script = _Script({"partitions": 2})
    start_s = time.monotonic()
    for number in range(failing):
        script.train(number)
    script.fault.where, script.fault.rank = where, at
    try:
        try:
            script.train(failing)
        except ValueError:
            script.fault.where = None
            if then == "barrier":
                smp.barrier()
            script.train(failing)
    except BaseException as error:
        assert time.monotonic() - start_s < _BOUND_S
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        raise


@pytest.mark.parametrize(
    ("where", "rank", "failing", "then"),
    [
        ("before", 0, 0, "step"), ("before", 1, 3, "step"), ("after", 0, 3, "barrier"),
        ("unit", 1, 3, "step"), ("backward", 1, 0, "step"), ("backward", 1, 3, "barrier"),
    ],
)  # fmt: skip
def test_error_of_one_rank_is_told_to_all(
    where: str, rank: int, failing: int, then: str, capsys: Any
) -> None:
    at = None if where in ("unit", "backward") else rank
    report = run_ranks_expect_failure(
        _until_refused, 2, where, at, failing, then, timeout=_TIMEOUT_S
    )
    assert all(outcome.exitcode for outcome in report.outcomes)
    call = "_Script.__init__.<locals>.train" + (f" (call {failing + 1})" if failing else "")
    told = f"rank {rank} left {call} by ValueError: {_WORDS}, and rank {1 - rank} is in {call} at "
    assert f"CommunicationError: {told}" in (report.outcomes[rank].error or "")
    output = capsys.readouterr().out
    other = [line for line in output.splitlines() if line.startswith(f"[rank {1 - rank}]")]
    assert any(told in line for line in other), output
    assert "Timed out" not in output
