"""Ranks that wait for what never comes are told so by name, in seconds, not at the timeout."""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_smp as smp
from tests.support.launch import Outcome, run_ranks, run_ranks_expect_failure

pytestmark = pytest.mark.timeout(150)

_TIMEOUT_S = 60.0  # of the run, far above the bound
_BOUND_S = 25.0  # generous, for busy machines; a few seconds are usual
_UNCOMPARED = 11  # from this step on batches are not compared


class _Script:
    """What every rank runs until the fault."""

    def __init__(self, config: dict[str, Any]) -> None:
        smp.init({"microbatches": 2, "timeout": _TIMEOUT_S, **config})
        torch.manual_seed(0)
        self.model = smp.DistributedModel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))

        @smp.step
        def train(x: torch.Tensor) -> Any:
            loss = self.model(x).pow(2).sum()
            self.model.backward(loss)
            return loss

        self._train = train

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._train(torch.ones(4, 4))


def _barrier_of_one(script: _Script, rank: int) -> None:
    script.train(_UNCOMPARED)
    if rank == 0:
        smp.barrier()
    script.train()


def _state_of_one(script: _Script, rank: int) -> None:
    script.train(_UNCOMPARED)
    if rank == 1:
        script.model.state_dict()
    script.train()


def _message_that_nobody_sends(script: _Script, rank: int) -> None:
    if rank == 1:
        smp.recv_from(0)
    smp.barrier()


def _norm_of_one(script: _Script, rank: int) -> None:
    script.train(_UNCOMPARED)
    if rank == 0:
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
    script.train()


def _last_rank_ends(script: _Script, rank: int) -> None:
    script.train(_UNCOMPARED)
    if rank < smp.size() - 1:
        script.train()


def _first_rank_ends(script: _Script, rank: int) -> None:
    script.train(_UNCOMPARED)
    if rank > 0:
        script.train()


def run(rank: int, size: int, fault: Callable[..., None], config: dict[str, Any]) -> None:
    script = _Script(config)
    smp.barrier()
    start_s = time.monotonic()
    try:
        fault(script, rank)
    except BaseException as error:
        assert time.monotonic() - start_s < _BOUND_S
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        raise
    finally:
        atexit._run_exitfuncs()


def _fail(
    fault: Callable[..., None], capsys: Any, size: int = 2, **config: Any
) -> tuple[list[Outcome], str]:
    start_s = time.monotonic()
    report = run_ranks_expect_failure(run, size, fault, {"partitions": 2, **config}, timeout=90)
    assert time.monotonic() - start_s < _BOUND_S + 15
    return report.outcomes, capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "rank", "called", "other"),
    [
        (_barrier_of_one, 0, "smp.barrier(WORLD)", "train"),
        (_state_of_one, 1, "model.state_dict()", "train"),
        (_norm_of_one, 0, "clip_grad_norm_()", "train"),
        (_message_that_nobody_sends, 1, "smp.recv_from(rank 0)", "smp.barrier(WORLD)"),
    ],
)
def test_calls_of_a_part_of_the_ranks(
    fault: Any, rank: int, called: str, other: str, capsys: Any
) -> None:
    outcomes, output = _fail(fault, capsys)
    assert all(outcome.exitcode for outcome in outcomes)
    told = [line for line in output.splitlines() if "no rank can go on: " in line]
    assert told
    for line in told:
        for who, what in ((rank, called), (1 - rank, other)):
            own = line.partition(f"rank {who} waits in ")[2].partition(" for rank ")[0]
            assert what in own, line
            assert " at test_endless.py:" in own, line
    assert "Timed out" not in output


@pytest.mark.parametrize(
    ("fault", "ended", "size", "config"),
    [
        pytest.param(_last_rank_ends, 1, 2, {}, id="pp2"),
        pytest.param(_first_rank_ends, 0, 2, {}, id="pp2-first"),
        pytest.param(_last_rank_ends, 1, 2, {"partitions": 1}, id="dp2"),
        pytest.param(_last_rank_ends, 3, 4, {"placement_strategy": "spread"}, id="pp2-dp2"),
    ],
)
def test_a_rank_that_ends_early(
    fault: Any, ended: int, size: int, config: dict[str, Any], capsys: Any
) -> None:
    outcomes, output = _fail(fault, capsys, size, **config)
    told = f"rank {ended} ended its script after "
    for rank, outcome in enumerate(outcomes):
        if rank == ended:
            assert outcome.exitcode == 0
            continue
        assert outcome.exitcode
        own = [line for line in output.splitlines() if line.startswith(f"[rank {rank}]")]
        assert any(told in line and f"(call {_UNCOMPARED})" in line for line in own), output


def compare_calls(rank: int, size: int) -> None:
    script = _Script({"partitions": 2})
    script.train()
    barrier, allgather = smp.barrier, functools.partial(smp.allgather, rank)
    state, step = script.model.state_dict, script.train
    for calls in ((barrier, allgather), (allgather, step), (step, barrier), (state, barrier)):
        with pytest.raises(smp.SMPError, match="came to different calls: rank 0: ") as raised:
            calls[rank]()
        assert "rank 1: " in str(raised.value)
        assert ("the batch of step" in str(raised.value)) is (step in calls)
    assert smp.allgather(rank) == [0, 1]  # the ranks are still in step with each other
    script.train()


def test_different_calls_are_compared_where_that_costs_little() -> None:
    run_ranks(compare_calls, 2)
