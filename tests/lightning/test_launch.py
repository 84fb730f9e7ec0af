"""Real programs, started by Lightning's own launcher and by torchrun, that end well or badly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.timeout(200)

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 150
_GONE_S = 25.0  # from the fault to the end of the last process
_WORDS = "the user's own words"

_PROGRAM = """
import os
import signal
import sys
import time

import lightning.pytorch as pl
import lightning_smp
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fault, victim, workers = [*sys.argv[1:], *["", "-1", "0"][len(sys.argv) - 1 :]]


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == int(victim):
            print("fault at", time.monotonic(), flush=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the user's own words")
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_smp.SMPStrategy(pipeline_parallel_degree=2, microbatches=2),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, 4, num_workers=int(workers), persistent_workers=workers != "0")
    trainer.fit(Model(), loader)
    loss = float(trainer.callback_metrics["loss_epoch"])
    print(f"rank {trainer.global_rank} of {trainer.world_size}: loss {loss:.6f}", flush=True)
"""


class Ended(NamedTuple):
    """How a program ended: its exit code, what its processes wrote, when the last one was gone."""

    code: int
    output: str
    at_s: float

    @property
    def fault_at_s(self) -> float:
        """When the fault happened."""
        (line,) = [line for line in self.output.splitlines() if line.startswith("fault at")]
        return float(line.split()[-1])


def _run(command: list[str], folder: Path) -> Ended:
    """Runs a program to the end of all its processes; kills them if that takes too long."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PL_")}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)  # until every process has closed it
        while _lives(process.pid):
            time.sleep(0.05)
        return Ended(process.returncode, output, time.monotonic())
    finally:
        if _lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The path of a program that trains on two processes."""
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    return str(path)


def _requires_two_ranks(ended: Ended) -> None:
    assert ended.code == 0, ended.output
    # The ranks write to one pipe, so that their lines may stand in one another.
    found = sorted(re.findall(r"rank (\d) of 2: loss (\d+\.\d{6})", ended.output))
    assert [rank for rank, _ in found] == ["0", "1"], ended.output
    assert len({loss for _, loss in found}) == 1, found


def test_lightnings_own_launcher(program: str, tmp_path: Path) -> None:
    _requires_two_ranks(_run([sys.executable, program], tmp_path))


def test_torchrun(program: str, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    _requires_two_ranks(_run([sys.executable, *command], tmp_path))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_exception_under_lightnings_launcher(program: str, tmp_path: Path, victim: int) -> None:
    ended = _run([sys.executable, program, "raise", str(victim)], tmp_path)
    assert ended.code != 0
    assert ended.at_s - ended.fault_at_s < _GONE_S
    assert f"ValueError: {_WORDS}" in ended.output
    assert f"failure on rank {victim} (stage {victim}" in ended.output
    assert f"the first failure was on rank {victim} (stage {victim}" in ended.output


# With a worker process, which holds the connections of its parent until it notices the death.
@pytest.mark.parametrize(
    ("victim", "workers"),
    [(0, 0), *(pytest.param(*v, marks=pytest.mark.slow) for v in [(1, 0), (0, 1)])],
)
def test_death_under_lightnings_launcher(
    program: str, tmp_path: Path, victim: int, workers: int
) -> None:
    ended = _run([sys.executable, program, "kill", str(victim), str(workers)], tmp_path)
    assert ended.code != 0
    assert ended.at_s - ended.fault_at_s < _GONE_S
    assert f"failure on rank {1 - victim} (stage {1 - victim}" in ended.output


@pytest.mark.slow
def test_exception_under_torchrun(program: str, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    ended = _run([sys.executable, *command, "raise", "1"], tmp_path)
    assert ended.code != 0
    assert ended.at_s - ended.fault_at_s < _GONE_S
    assert f"ValueError: {_WORDS}" in ended.output
    assert "the first failure was on rank 1 (stage 1" in ended.output


# ---- what is refused ----------------------------------------------------------------------------


def _fit(rank: int, world_size: int, devices: int, options: dict[str, Any]) -> str:
    """Trains; returns the message of the refusal."""
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_smp import SMPStrategy

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=SMPStrategy(**options),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        trainer.fit(BoringModel())
    return str(caught.value)


def test_wrong_devices_are_refused_by_lightning() -> None:
    for message in run_ranks(_fit, 2, 3, {"pipeline_parallel_degree": 2}):
        assert "You set `devices=3`" in message
        assert "does not match the world size (2)" in message


def test_degrees_that_do_not_divide_the_ranks_are_refused() -> None:
    for message in run_ranks(_fit, 2, 2, {"pipeline_parallel_degree": 4}):
        assert "pipeline_parallel_degree" in message
