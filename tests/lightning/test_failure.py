"""A failure of one rank ends all of them in seconds, and its message reaches the others.

Each case is one start of the ranks. Bounds are generous, for busy machines; what a failure takes
is usually a second or two.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.equality.case import NUM_CLASSES, NUM_FEATURES, Samples, as_loss, block, points
from tests.support.launch import Outcome, run_ranks_expect_failure

pytestmark = pytest.mark.timeout(150)

_NOTICED_S = 20.0  # from the fault to the last exception
_RUN_TIMEOUT_S = 90
_STOPPED_S = 15
_BATCH = 2  # the batch in which something goes wrong
_FOLDER = "SMP_TEST_FOLDER"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_WORDS = "the user's own words"


class Fault(nn.Linear):
    """A unit that goes wrong in the third batch's second microbatch, where it is computed."""

    def __init__(self, kind: str) -> None:
        super().__init__(NUM_FEATURES, NUM_CLASSES)
        self.kind = kind
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not an analysis
            self.calls[0] += 1
            if self.calls[0] == 2 * _BATCH + 2:
                _go_wrong(self.kind)
        return super().forward(x)


class Model(pl.LightningModule):
    """Blocks for the first stages and a layer for the last; outer code may fail on one rank."""

    def __init__(self, inside: str = "", outside: str = "", rank: int = 0, batch: int = _BATCH):
        super().__init__()
        self.net = nn.Sequential(block(), block(), block(), block())
        self.last = Fault(inside)
        self.outside, self.rank, self.batch = outside, rank, batch
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if batch_idx == self.batch and self.global_rank == self.rank:
            _go_wrong(self.outside)
        return as_loss(self.last(self.net(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unreadable(Samples):
    """Samples of which one cannot be read on one rank."""

    def __getitem__(self, index: int) -> Any:
        if index == 13 and os.environ["RANK"] == "1":
            _note_time("fault")
            raise OSError(_WORDS)
        return super().__getitem__(index)


class Saver(pl.Callback):
    """Does what OnExceptionCheckpoint does."""

    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(Path(os.environ[_FOLDER], "last.ckpt"))


class Loner(pl.Callback):
    """On one rank does what all ranks should do, or leaves."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != _BATCH or trainer.global_rank != 1:
            return
        _note_time("fault")
        if self.what == "exit":
            sys.exit(3)
        if self.what == "stop":
            trainer.limit_train_batches = batch_idx + 1
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        if self.what == "barrier":
            trainer.strategy.barrier()


def _go_wrong(kind: str) -> None:
    if kind:
        _note_time("fault")
    if kind == "raise":
        raise ValueError(_WORDS)
    if kind in ("exit", "exit_well"):
        os._exit(3 if kind == "exit" else 0)
    if kind == "stop":  # the run ends when this rank is gone too
        subprocess.Popen(["sh", "-c", f"sleep {_STOPPED_S}; kill -9 {os.getpid()}"])
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    while kind == "loop":
        time.sleep(0.1)


def _note_time(what: str) -> None:
    Path(os.environ[_FOLDER], what).write_text(str(time.monotonic()))


def _fit(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """What every rank runs."""
    from lightning_smp import SMPStrategy

    pl.seed_everything(1, verbose=False)
    pp, timeout = options.pop("pp", 2), options.pop("timeout", 60)
    data = Unreadable if options.pop("unreadable", False) else Samples
    callbacks: list[Any] = [Saver()] if options.pop("saves", False) else []
    if (alone := options.pop("alone", "")) != "":
        callbacks.append(Loner(alone))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=SMPStrategy(pipeline_parallel_degree=pp, microbatches=2, timeout=timeout),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    try:
        trainer.fit(Model(**options), DataLoader(data(points().samples), batch_size=4))
    finally:
        _note_time(f"end{rank}")


class Run(NamedTuple):
    """How a run ended: each rank, all that was written, and when ranks noticed."""

    outcomes: list[Outcome]
    output: str
    noticed_s: dict[int, float]


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Trains until the fault; fails if a rank ends well or too late."""

    def run(ranks: int, *, late: float = _NOTICED_S, **options: Any):
        report = run_ranks_expect_failure(
            _fit, ranks, options, timeout=_RUN_TIMEOUT_S, env={_FOLDER: str(tmp_path)}
        )
        output = capsys.readouterr().out
        assert (tmp_path / "fault").exists(), report.outcomes
        start_s = float((tmp_path / "fault").read_text())
        noticed_s = {
            rank: float(end.read_text()) - start_s
            for rank in range(ranks)
            if (end := tmp_path / f"end{rank}").exists()
        }
        sys.stdout.write(f"{report.elapsed_s:.1f} s in all, noticed {noticed_s}\n{output}")
        assert all(seconds < late for seconds in noticed_s.values()), noticed_s
        return Run(report.outcomes, output, noticed_s)

    return run


def _requires_message(run: Run, failed: int, where: str) -> None:
    """The original error is the failed rank's, and the others name it."""
    first = f"on rank {failed} ({where})"
    error = run.outcomes[failed].error or ""
    assert _WORDS in error
    assert first in run.output
    for rank, outcome in enumerate(run.outcomes):
        assert outcome.exitcode != 0
        if rank == failed:
            continue
        lines = [line for line in run.output.splitlines() if line.startswith(f"[rank {rank}]")]
        named = [line for line in lines if "the first failure was" in line]
        assert any(first in line and _WORDS in line for line in named), lines


def test_exception_in_a_unit(fail: Any) -> None:
    run = fail(2, inside="raise")
    _requires_message(run, 1, "stage 1, forward of microbatch 1")
    assert "the first failure was on rank 1" in (run.outcomes[0].error or "")  # in the traceback


def test_exception_in_outer_code_of_one_rank(fail: Any) -> None:
    _requires_message(fail(2, outside="raise"), 0, "stage 0, forward of microbatch 0")


def test_exception_in_the_data_loader_of_one_rank(fail: Any) -> None:
    run = fail(2, unreadable=True)
    assert _WORDS in (run.outcomes[1].error or "")
    assert f"the first failure was on rank 1 (stage 1): OSError: {_WORDS}" in run.output


def test_exception_reaches_the_far_end_of_a_pipeline(fail: Any) -> None:
    _requires_message(fail(4, pp=4, inside="raise"), 3, "stage 3, forward of microbatch 1")


def test_exception_reaches_the_other_replica(fail: Any) -> None:
    run = fail(4, pp=2, outside="raise", rank=2)
    assert "the first failure was on rank 2" in run.output
    assert all(outcome.exitcode for outcome in run.outcomes)


@pytest.mark.parametrize(("kind", "code"), [("exit", 3), ("exit_well", 0), ("kill", -9)])
def test_death_of_a_rank(fail: Any, kind: str, code: int) -> None:
    run = fail(2, inside=kind)
    assert run.outcomes[1] == Outcome(code, None)
    assert run.outcomes[0].exitcode == 1
    assert "on rank 0 (stage 0, " in run.output
    assert "no sign of life from rank 1" in (run.outcomes[0].error or "")


def test_death_in_the_middle_of_a_pipeline(fail: Any) -> None:
    run = fail(4, pp=4, outside="kill", rank=1)
    assert "no sign of life from rank 1" in run.output
    assert [outcome.exitcode for outcome in run.outcomes if outcome.exitcode in (0, None)] == []


def test_stopped_rank_ends_the_others_after_the_timeout(fail: Any) -> None:
    run = fail(2, inside="stop", timeout=4)
    assert run.outcomes[0].exitcode == 1
    assert "no sign of life from rank 1" in (run.outcomes[0].error or "")
    assert 3 < run.noticed_s[0] < _STOPPED_S


def test_rank_that_never_comes_back_is_ended(fail: Any) -> None:
    run = fail(2, outside="loop", timeout=4)
    assert run.outcomes[1].exitcode == 1
    assert run.outcomes[0].exitcode == 70
    assert "rank 0 is ended; the first failure was on rank 1 (stage 1" in run.output


def test_exception_in_the_first_batch(fail: Any) -> None:
    _requires_message(fail(2, outside="raise", batch=0), 0, "stage 0, forward of microbatch 0")


def test_checkpoint_on_exception_is_refused(fail: Any) -> None:
    run = fail(2, inside="raise", saves=True)
    _requires_message(run, 1, "stage 1, forward of microbatch 1")
    assert "CheckpointError: a checkpoint was asked for after an exception" in run.outcomes[1].error
    assert all(outcome.exitcode for outcome in run.outcomes)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_of_one_rank(fail: Any, rank: int) -> None:
    run = fail(2, outside="term", rank=rank)
    assert all(outcome.exitcode is not None for outcome in run.outcomes)
    assert "Timed out" not in run.output


def test_rank_that_ends_its_script(fail: Any) -> None:
    run = fail(2, alone="exit")
    assert run.outcomes[0].exitcode
    assert "rank 1 ended its script (exit code 3) after training_step (call 3)" in run.output


def test_rank_that_has_fewer_batches(fail: Any) -> None:
    run = fail(2, alone="stop")
    through = "rank 1 is through with its Trainer's run after training_step (call 3)"
    assert f"{through}, while rank 0 waits in training_step (call 4)" in run.output


def test_barrier_of_one_rank(fail: Any) -> None:
    run = fail(2, alone="barrier")
    assert all(outcome.exitcode for outcome in run.outcomes)
    assert "rank 1 waits in barrier" in run.output
    assert "rank 0 waits in the exchange of signals (call 4) at test_failure.py:" in run.output
