"""The launcher itself: results, failures, timeouts, leftovers."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import (
    RankFailure,
    RankTimeout,
    gloo_group,
    run_ranks,
    run_ranks_expect_failure,
)


def _sum_of_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
    with gloo_group():
        value = torch.full((2,), rank * scale)
        dist.all_reduce(value)
    return value


def _environment(rank: int, world_size: int) -> tuple[object, ...]:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SMP_TEST")
    found = TorchElasticEnvironment.detect()
    return found, torch.get_num_threads(), *(os.environ[name] for name in names)


def _one_raises(rank: int, world_size: int) -> None:
    with gloo_group():
        if rank == 1:
            raise ValueError("stage one is unwell")
        dist.barrier()


def _one_is_killed(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _one_hangs(rank: int, world_size: int) -> None:
    if rank == 1:
        subprocess.Popen(["sleep", "300"])
        time.sleep(300)


def _return_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def _say_hello(rank: int, world_size: int) -> None:
    sys.stdout.write("hello\n")


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 2, 0.5)
    assert [result.tolist() for result in results] == [[0.5, 0.5], [0.5, 0.5]]


def test_environment_is_that_of_torchrun() -> None:
    results = run_ranks(_environment, 4, env={"SMP_TEST": "x"}, local_world_size=2)
    assert results == [(True, 1, str(r % 2), str(r // 2), "2", "x") for r in range(4)]


def test_failure_names_rank_and_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*_one_raises.*stage one is unwell"):
        run_ranks(_one_raises, 2)


def test_death_by_signal_is_a_failure() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2: died with exit code -9"):
        run_ranks(_one_is_killed, 2)


def test_timeout_shows_the_stack_and_ends_grandchildren() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankTimeout, match=r"(?s)ranks \[1\] of 2.*_one_hangs"):
        run_ranks(_one_hangs, 2, timeout=2)
    assert time.monotonic() - start_s < 10


def test_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(_return_lambda, 1)


def test_expected_failure_reports_every_rank() -> None:
    outcomes, elapsed_s = run_ranks_expect_failure(_one_raises, 2)
    assert outcomes[1].exitcode == 1
    assert "stage one is unwell" in (outcomes[1].error or "")
    assert outcomes[0].error is not None  # its barrier broke
    assert elapsed_s < 20


def test_expected_failure_that_does_not_come_is_one() -> None:
    with pytest.raises(RankFailure, match="all 2 ranks ended well"):
        run_ranks_expect_failure(_say_hello, 2)


def test_output_is_repeated_in_the_parent(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_say_hello, 2)
    assert capsys.readouterr().out == "[rank 0] hello\n[rank 1] hello\n"
