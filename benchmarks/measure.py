"""Clocks, alternating repetitions and two processes: what the benchmarks have in common.

No figure is computed here; see `benchmarks.pipeline`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["Cost", "Runs", "alternate", "median_of", "run_two_ranks"]

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one microbatch cost this rank, in microseconds: CPU time of its Python threads, wall."""

    cpu_us: float
    wall_us: float


Runs = dict[str, list[Cost]]
"""Contender -> its cost in each round; the same index is the same round."""


def python_cpu_s() -> float:
    """CPU time of all Python threads: the main thread and forwards that run in their own."""
    clock_of = time.pthread_getcpuclockid
    idents = [thread.ident for thread in threading.enumerate()]
    return sum(time.clock_gettime(clock_of(ident)) for ident in idents if ident is not None)


def alternate(
    contenders: Mapping[str, Callable[[], None]], *, microbatches: int, rounds: int, repeats: int,
    together: bool = True,
) -> Runs:  # fmt: skip
    """Runs the contenders in turns, each round in the reverse order of the last.

    Collective over the world if `together`: every rank must call with the same contenders.

    Args:
        contenders: each runs one step of ``microbatches``.
        microbatches: what a step's cost is divided by.
        rounds: turns of each contender.
        repeats: steps in a turn.
        together: whether all ranks call this, and begin each turn at the same time.
    """
    runs: Runs = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            if together:
                dist.barrier()
            runs[name].append(_cost(contenders[name], microbatches * repeats, repeats))
        order.reverse()
    return runs


def _cost(step: Callable[[], None], microbatches: int, repeats: int) -> Cost:
    wall, cpu = time.perf_counter(), python_cpu_s()
    for _ in range(repeats):
        step()
    cpu, wall = python_cpu_s() - cpu, time.perf_counter() - wall
    return Cost(cpu * 1e6 / microbatches, wall * 1e6 / microbatches)


def median_of(values: Callable[[int], float], rounds: int) -> float:
    """The median over the rounds."""
    return median(values(index) for index in range(rounds))


def run_two_ranks(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``work(rank, *args)`` in two gloo processes of one thread; returns both results."""
    with tempfile.TemporaryDirectory(prefix="smp_benchmark_") as folder:
        # Forked: importing everything again would cost more than the runs.
        start_processes(_rank_main, (folder, work, args), 2, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _rank_main(rank: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=_TIMEOUT
    )
    try:
        torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
