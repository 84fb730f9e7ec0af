"""Starts a test function as several ranks, cheaply, and leaves nothing behind.

    def step(rank: int, world_size: int, scale: float) -> float:   # module level: found by name
        dist.init_process_group("gloo")                            # env://, as under torchrun
        ...

    def test_step():
        assert run_ranks(step, 2, 0.5) == [..., ...]               # one result per rank

Workers fork from one fork server per session that has torch and lightning loaded already (a worker
starts in tens of milliseconds). Each sees the environment that torchrun would give it, the parent's
other variables and `env`. The rendezvous store lives in the parent on a port the system chose, so
there is no port to race for. Results travel back by pickle: tensors are fine, closures are not.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

from tests.support._worker import Job, Report, worker_main

__all__ = [
    "FailureReport",
    "Outcome",
    "RankFailure",
    "RankTimeout",
    "gloo_group",
    "run_ranks",
    "run_ranks_expect_failure",
]

_PRELOAD = ("pytest", "torch", "torch.distributed", "lightning.pytorch", "tests.support._worker")
_GRACE_AFTER_FAILURE_S = 5.0  # time the other ranks get to fail by themselves
_GRACE_AT_EXIT_S = 30.0  # time a worker gets to end after its result arrived; NCCL takes some


class RankFailure(AssertionError, RuntimeError):
    """A rank raised, died or did not end; the message holds its rank and full traceback."""


class RankTimeout(RankFailure):
    """Not all ranks ended in time; the message holds the stack of each that had not."""


class Outcome(NamedTuple):
    """How one rank ended: its exit code (negative: the signal that killed it), its traceback."""

    exitcode: int | None
    error: str | None


class FailureReport(NamedTuple):
    """How all ranks of a run ended, and how long that took after the workers were started."""

    outcomes: list[Outcome]
    elapsed_s: float


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    local_world_size: int | None = None,
    cpu_threads: int = 1,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` processes; returns a result per rank.

    Args:
        fn: a module-level function.
        world_size: number of ranks.
        args: further arguments, picklable.
        timeout: seconds for the whole run.
        env: extra environment variables for every worker.
        local_world_size: ranks per pretended node (default: one node).
        cpu_threads: threads torch may use in one operation.

    Raises:
        RankFailure: a rank raised or died; carries the traceback of each that did.
        RankTimeout: the time is over; carries all stacks.
    """
    with _started(fn, world_size, args, timeout, env, local_world_size, cpu_threads) as run:
        run.collect(grace_after_failure_s=_GRACE_AFTER_FAILURE_S)
        run.raise_failures()
        return [pickle.loads(run.reports[rank].result or b"") for rank in range(world_size)]


def run_ranks_expect_failure(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    local_world_size: int | None = None,
    cpu_threads: int = 1,
) -> FailureReport:
    """As `run_ranks`, for runs in which ranks must fail: returns how each one ended, and when.

    Raises:
        RankFailure: no rank failed.
        RankTimeout: a rank was still running at the end of the time.
    """
    with _started(fn, world_size, args, timeout, env, local_world_size, cpu_threads) as run:
        run.collect(grace_after_failure_s=None)
        elapsed_s = time.monotonic() - run.started_s
        outcomes = [run.outcome(rank) for rank in range(world_size)]
        if all(outcome == Outcome(0, None) for outcome in outcomes):
            raise RankFailure(f"expected a failure, but all {world_size} ranks ended well")
        return FailureReport(outcomes, elapsed_s)


@contextlib.contextmanager
def gloo_group(timeout_s: float = 30) -> Iterator[None]:
    """Initialises the default gloo group from the environment, and destroys it at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    yield
    # Not after an exception: peers would notice the closed sockets before it is reported.
    dist.destroy_process_group()


@dataclass
class _Run:
    """The workers of one run, from start to end."""

    jobs: list[Job]
    processes: list[ForkServerProcess]
    connections: list[Connection]
    reports: dict[int, Report]
    started_s: float
    deadline_s: float

    def collect(self, *, grace_after_failure_s: float | None) -> None:
        """Waits until every worker has ended; raises `RankTimeout` if one does not.

        With a grace time, workers that outlive another's failure that long are killed.
        """
        deadline_s = self.deadline_s
        while running := [r for r, process in enumerate(self.processes) if process.is_alive()]:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                self._end_late(running)
                return
            wait([self.processes[r].sentinel for r in running] + self._open(running), left_s)
            self._receive()
            if grace_after_failure_s is not None and self._failed_ranks():
                deadline_s = min(deadline_s, time.monotonic() + grace_after_failure_s)
                grace_after_failure_s = None
            elif len(self.reports) == len(self.jobs):
                deadline_s = min(deadline_s, self._last_report_s() + _GRACE_AT_EXIT_S)
        self._receive()

    def _last_report_s(self) -> float:
        return max(report.at_s for report in self.reports.values())

    def _open(self, ranks: Sequence[int]) -> list[Connection]:
        return [self.connections[r] for r in ranks if r not in self.reports]

    def _receive(self) -> None:
        for rank, connection in enumerate(self.connections):
            if rank not in self.reports and connection.poll():
                with contextlib.suppress(EOFError):  # died without a report: see outcome()
                    self.reports[rank] = pickle.loads(connection.recv_bytes())

    def _end_late(self, running: Sequence[int]) -> None:
        """Kills the ranks that are late; their stacks go into the error unless one failed."""
        stacks = self._dump_stacks(running)
        self.kill()
        if self._failed_ranks(among=set(range(len(self.jobs))) - set(running)):
            return
        elapsed_s = time.monotonic() - self.started_s
        raise RankTimeout(
            f"ranks {list(running)} of {len(self.jobs)} had not ended after {elapsed_s:.1f} s\n"
            + "\n".join(stacks[r] + self._output_tail(r) for r in running)
        )

    def _dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes to a file; there is nothing to wait on
        return {r: f"--- stack of rank {r}\n{_text(self.jobs[r].stack_path)}" for r in ranks}

    def kill(self) -> None:
        """Ends every worker and what it started in its process group."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()

    def outcome(self, rank: int) -> Outcome:
        """How a rank that ended, ended."""
        report = self.reports.get(rank)
        return Outcome(self.processes[rank].exitcode, report.error if report else None)

    def _failed_ranks(self, among: set[int] | None = None) -> list[int]:
        """Ranks that raised or died, the earliest first."""
        ranks = range(len(self.jobs)) if among is None else sorted(among)
        failed = [r for r in ranks if self.outcome(r).error or self.processes[r].exitcode]
        now_s = time.monotonic()
        return sorted(failed, key=lambda r: self.reports[r].at_s if r in self.reports else now_s)

    def raise_failures(self) -> None:
        """Raises if any rank failed, with every failed rank's traceback, the earliest first.

        All of them, because a rank that only lost its peer may report before the culprit.
        """
        if failed := self._failed_ranks():
            raise RankFailure("\n".join(self._description(rank) for rank in failed))

    def _description(self, rank: int) -> str:
        exitcode, error = self.outcome(rank)
        what = error or f"died with exit code {exitcode}\n{_text(self.jobs[rank].stack_path)}"
        return f"rank {rank} of {len(self.jobs)}: {what}{self._output_tail(rank)}"

    def _output_tail(self, rank: int) -> str:
        text = _text(self.jobs[rank].output_path).strip()
        return f"\n--- output of rank {rank}\n{text[-4000:]}" if text else ""

    def show_output(self) -> None:
        """Repeats the workers' output in the parent, where pytest captures it."""
        for rank, job in enumerate(self.jobs):
            for line in _text(job.output_path).splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")


@contextlib.contextmanager
def _started(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    env: Mapping[str, str] | None,
    local_world_size: int | None,
    cpu_threads: int,
) -> Iterator[_Run]:
    from torch.distributed import TCPStore

    # As under torchrun the store outlives the ranks and is bound before they start.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="smp_ranks_") as folder:
        jobs = [
            Job(
                payload=payload,
                environ={
                    **os.environ,
                    **_rank_environ(rank, world_size, local_world_size or world_size),
                    "MASTER_PORT": str(store.port),
                    "OMP_NUM_THREADS": str(cpu_threads),
                    **(env or {}),
                },
                rank=rank,
                world_size=world_size,
                cpu_threads=cpu_threads,
                folder=Path(folder),
                kill_after_s=timeout_s + 30,
            )
            for rank in range(world_size)
        ]
        run = _start(jobs, timeout_s)
        try:
            yield run
        finally:
            run.kill()
            run.show_output()
            for connection in run.connections:
                connection.close()


def _start(jobs: list[Job], timeout_s: float) -> _Run:
    context = _context()
    run = _Run(jobs, [], [], {}, time.monotonic(), time.monotonic() + timeout_s)
    try:
        for job in jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=worker_main, args=(job, sender), daemon=False)
            process.start()
            sender.close()  # so that a dead worker reads as the end of the pipe
            run.processes.append(process)
            run.connections.append(receiver)
    except BaseException:
        run.kill()
        raise
    return run


@cache
def _context() -> ForkServerContext:
    """The fork server of this session, with the expensive imports done once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOAD if _is_installed(name)])
    before = os.environ.get("OMP_NUM_THREADS")
    # Thread pools made by an import do not survive a fork: the server must not have any.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _is_installed(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None


def _rank_environ(rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """The variables that torchrun sets, without the port."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(-(-world_size // local_world_size)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
