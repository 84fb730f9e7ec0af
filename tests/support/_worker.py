"""The worker side of `tests.support.launch`: environment, output, result, stack dump on request.

Imports neither torch nor lightning at module level, so that the order "environment first, torch
second" holds even where the fork server could not preload them.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["Job", "Report", "worker_main"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one worker needs to know.

    Attributes:
        payload: pickled `(fn, args)`; plain pickle, because torch's own reductions would share
            memory with a parent or worker that may be gone when the tensor is read.
        environ: the worker's complete environment.
        rank: global rank.
        world_size: number of workers.
        cpu_threads: threads torch may use inside one operation.
        folder: where this run's output and stack dumps go.
        kill_after_s: the worker kills itself after that long (the parent may have died).
    """

    payload: bytes
    environ: dict[str, str]
    rank: int
    world_size: int
    cpu_threads: int
    folder: Path
    kill_after_s: float

    @property
    def output_path(self) -> Path:
        """The file with this worker's stdout and stderr."""
        return self.folder / f"rank{self.rank}.out"

    @property
    def stack_path(self) -> Path:
        """The file with this worker's stack dumps."""
        return self.folder / f"rank{self.rank}.stack"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one worker says at its end: a pickled result, or the traceback of its exception."""

    result: bytes | None
    error: str | None
    at_s: float  # time.monotonic(), one clock for all processes of a host


def worker_main(job: Job, connection: Connection) -> None:
    """Runs the job's function as one rank and reports its result or its exception."""
    os.setsid()  # a group of its own: the parent kills it with everything it started
    os.environ.clear()
    os.environ.update(job.environ)
    stacks = job.stack_path.open("w")
    # The dump must come from C: a rank that hangs in a collective never runs a Python handler.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    faulthandler.dump_traceback_later(job.kill_after_s, exit=True, file=stacks)
    _redirect_output(job.output_path)
    # A rank starts processes (loader workers) as a user's would, not as it was started itself.
    multiprocessing.set_start_method(None, force=True)
    report = _run(job)
    sys.stdout.flush()
    sys.stderr.flush()
    # The worker's end may hang too, or the parent may be gone: neither may hide the report.
    with contextlib.suppress(BrokenPipeError):
        connection.send_bytes(pickle.dumps(report))
    if report.error is not None:
        sys.exit(1)
    _leave_process_group()


def _run(job: Job) -> Report:
    try:
        import torch

        torch.set_num_threads(job.cpu_threads)
        fn, args = pickle.loads(job.payload)
        result = pickle.dumps(fn(job.rank, job.world_size, *args))
    except BaseException:  # reported to the parent, whatever it is (SystemExit, KeyboardInterrupt)
        return Report(result=None, error=traceback.format_exc(), at_s=time.monotonic())
    return Report(result=result, error=None, at_s=time.monotonic())


def _redirect_output(path: Path) -> None:
    """Points file descriptors 1 and 2 at `path`; the parent shows it after the run."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _leave_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
