"""Every test leaves the process as it found it: environment, threads, processes, process group."""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

_Item = TypeVar("_Item")

_LEAVE_TIME_S = 3.0  # a thread or process that is just ending gets so long to be gone
# Written by Lightning's seeding and device checks, by torch, OpenMP users and pytest, at any time.
_FREE_VARIABLES = (
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_", "KMP_", "CUBLAS_"),
    *("PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_"),
)
_FREE_THREADS = ("TMonitor", "QueueFeederThread", "pydevd")  # progress bars, queues, debuggers
_FREE_COMMANDS = ("orted",)  # Open MPI's, where Lightning asks for it to know its launcher


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves something behind, and clears it away for the next one."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    processes = _children()
    yield
    leaks = [
        *_leaked_variables(environment),
        *_leaked_process_group(),
        *_leaked_threads(threads),
        *_leaked_processes(processes),
    ]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _leaked_variables(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    names = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not name.startswith(_FREE_VARIABLES)
    )
    os.environ.clear()
    os.environ.update(before)
    return [f"environment variable {name} = {after.get(name)!r}" for name in names]


def _leaked_process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised torch.distributed process group"]


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    def left() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if not _is_free(thread)]

    return [f"thread {thread.name!r}" for thread in _wait_until_gone(left)]


def _is_free(thread: threading.Thread) -> bool:
    kind = type(thread).__name__
    return kind.startswith(("_Dummy", *_FREE_THREADS)) or thread.name.startswith(_FREE_THREADS)


def _leaked_processes(before: set[int]) -> list[str]:
    def left() -> list[int]:
        new = _children() - before
        return sorted(pid for pid in new if not _command(pid).startswith(_FREE_COMMANDS))

    return [f"process {pid} ({_command(pid)})" for pid in _wait_until_gone(left)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "a zombie"
    except OSError:
        return "ended meanwhile"


def _wait_until_gone(left: Callable[[], list[_Item]]) -> list[_Item]:
    deadline_s = time.monotonic() + _LEAVE_TIME_S
    while (found := left()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


def _children() -> set[int]:
    """Children of this process and of its fork server, but for the two helpers of multiprocessing.

    Zombies of processes that nobody waited for count as well.
    """
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    parents = {os.getpid(), server} - {None}
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # ended meanwhile
        parent = int(text.rpartition(")")[2].split()[1])
        if parent in parents:
            found.add(int(stat.parent.name))
    return found - {server, tracker}
