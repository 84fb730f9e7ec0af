"""Verification: what is equal is found equal, and a planted fault is found and named."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smp.commands.verify import main
from lightning_smp.errors import ConfigError, SMPError
from lightning_smp.verifying import verify
from lightning_smp.verifying.job import Job, find, path_of
from lightning_smp.verifying.launch import _run
from lightning_smp.verifying.probes import summary
from lightning_smp.verifying.report import compare
from lightning_smp.verifying.worker import train
from tests.support.launch import run_ranks
from tests.verifying.models import Network, batches

MODELS = "tests.verifying.models"


def job(name: str, world_size: int, **config: Any) -> Job:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, **config}
    return Job(
        module=f"{MODELS}:{name}", data=f"{MODELS}:batches", config=config, world_size=world_size,
        steps=2, seed=3, double=True, accelerator="cpu", path=[],
    )  # fmt: skip


def train_rank(rank: int, world_size: int, name: str, folder: Path, config: dict[str, Any]) -> None:
    torch.save(train(job(name, world_size, **config), is_reference=False), folder / f"{rank}.pt")


def report_of(name: str, world_size: int, folder: Path, **config: Any) -> Any:
    run_ranks(train_rank, world_size, name, folder, config, timeout=100)
    ranks = [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(world_size)]
    return compare(train(job(name, world_size, **config), is_reference=True), ranks)


def test_two_stages_of_two_replicas_with_dropout_are_equal(tmp_path: Path) -> None:
    report = report_of("Network", 4, tmp_path)
    assert report.equal, str(report)
    assert report.counts == {  # 5 units x 2 microbatches x 2 replicas; 10 parameters on 2 ranks
        "calls of units": 20, "gradients": 20, "losses": 8, "weights": 10
    }  # fmt: skip


def test_a_unit_that_computes_something_else_is_named(tmp_path: Path) -> None:
    report = report_of("Faulty", 2, tmp_path)
    assert report.first == "unit 'blocks.2'", str(report)
    assert "on rank 1" in report.differences[0]


def test_a_unit_with_a_wrong_backward_is_named(tmp_path: Path) -> None:
    report = report_of("FaultyBackward", 2, tmp_path)
    assert report.first is not None
    assert report.first.startswith("parameter 'blocks.2"), str(report)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_starts_its_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{MODELS}:Faulty", "--data", f"{MODELS}:batches", "--double"]) == 1
    assert "unit 'blocks.2'" in capsys.readouterr().out


def result() -> dict[str, Any]:
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    return {
        "probes": [[0, "a", 0, [summary(weight)]]],
        "gradients": {"a.w": weight, "b.w": weight},
        "parameters": ["a.w", "b.w"],
        "weights": {"a.w": weight, "b.w": weight},
        "losses": [1.0],
        "loss_dtype": "torch.float64",
        "replica": 0,
    }


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given.__setitem__(key, value)


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (change("probes", [[0, "a", 0, [summary(torch.ones(2))]]]), "unit 'a'"),
        (change("probes", [[0, "a", 0, [summary(torch.ones(2) * math.nan)]]]), "unit 'a'"),
        (lambda r: r["gradients"].update({"a.w": torch.ones(2).double()}), "parameter 'a.w'"),
        (lambda r: r["gradients"].pop("b.w"), "parameter 'b.w'"),
        (change("losses", [1.1]), "the loss of step 0"),
        (change("losses", [math.nan]), "the loss of step 0"),
        (lambda r: r["weights"].pop("b.w"), "weight 'b.w'"),
        (lambda r: r["weights"].update({"b.w": torch.ones(2)}), "weight 'b.w'"),
    ],
)
def test_every_kind_of_difference_is_found(
    fault: Callable[[dict[str, Any]], None], first: str
) -> None:
    reference = {**result(), "losses": [[1.0]]}
    assert compare(reference, [result()]).equal
    other = result()
    fault(other)
    assert compare(reference, [other]).first == first


def test_a_tolerance_may_be_given() -> None:
    other = {**result(), "losses": [1.0 + 1e-6]}
    reference = {**result(), "losses": [[1.0]]}
    assert not compare(reference, [other]).equal
    assert compare(reference, [other], tolerance=1e-5).equal


def test_only_what_other_processes_can_import_is_taken() -> None:
    assert path_of(Network) == f"{MODELS}:Network"
    assert find(path_of(batches)) is batches
    with pytest.raises(ConfigError, match="top level of a module"):
        path_of(lambda: Network().double())
    for path in ("nothing", "no.such.module:Name", f"{MODELS}:Missing", f"{MODELS}:__all__"):
        with pytest.raises(ConfigError):
            find(path)


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError):
        verify(Network, batches, config={"pipeline_parallel_degree": 2}, world_size=3)
    with pytest.raises(ConfigError, match="at least one step"):
        verify(Network, batches, steps=0)


def test_the_first_failure_is_told_last() -> None:
    output = """[rank: 0] ...
[lightning_smp] failure on rank 0 (stage 0): RuntimeError: Connection closed by peer
[lightning_smp] the first failure was on rank 1 (stage 1): ValueError: mine
W1130 09:50:34.467000 3376 torch/distributed/elastic/multiprocessing/api.py:1028] Sending ...
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    for text, reason in (
        (output, "on rank 1 (stage 1): ValueError: mine"),
        ("Traceback\n  File 1\nKeyError: 'x'\n", "KeyError: 'x'"),
    ):
        command = [sys.executable, "-c", f"import sys; print({text!r}); sys.exit(1)"]
        with pytest.raises(SMPError) as failure:
            _run(command, "the run", timeout=30)
        assert str(failure.value).endswith(f"\nthe run failed: {reason}")
        assert "elastic" not in str(failure.value)
