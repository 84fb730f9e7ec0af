"""What the throttled backend costs, and what its bound does: `python -m benchmarks.throttle`.

One process: NCCL on a CUDA device, gloo elsewhere. First the host's time for one asynchronous
all-reduce of a small tensor, in groups that take turns. Then 64 all-reduces that a busy device
keeps in flight, each of a tensor that nobody else holds: how much memory they keep, how long the
host issues, and how long all take.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lightning_smp.native.backend import counters, inner_of_smp, register

__all__ = ["main"]

_CALLS = 200
_ELEMENTS = 1024
_CONCURRENT = 64


@dataclass(frozen=True, slots=True)
class _Load:
    """One run of the second part: peak bytes held beyond the start, and seconds."""

    peak_bytes: int
    issue_s: float
    total_s: float
    max_in_flight: int | None


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.throttle", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="turns of each group")
    parser.add_argument("--mib", type=int, default=64, help="size of each of the 64 tensors")
    options = parser.parse_args(arguments)
    register()
    inner = inner_of_smp()
    device = torch.device("cuda", 0) if inner == "nccl" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group(inner, store=store, rank=0, world_size=1)
        try:
            _show(_machine(device, inner))
            _print_costs(device, inner, options.rounds)
            _print_loads(device, inner, options.mib)
        finally:
            dist.destroy_process_group()
    return 0


def _show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _machine(device: torch.device, inner: str) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, around {inner}"


def _group(name: str, limit: int | None) -> dist.ProcessGroup:
    """A group of its own; `limit` None for the plain backend `name`."""
    if limit is None:
        return dist.new_group(backend=name)
    os.environ["SMP_NCCL_THROTTLE_LIMIT"] = str(limit)
    try:
        return dist.new_group(backend="smp")
    finally:
        del os.environ["SMP_NCCL_THROTTLE_LIMIT"]


def _label(name: str, limit: int | None) -> str:
    return name if limit is None else f"smp, limit {limit}"


def _print_costs(device: torch.device, inner: str, rounds: int) -> None:
    limits = (None, -1, 8)
    groups = {limit: _group(inner, limit) for limit in limits}
    tensor = torch.ones(_ELEMENTS, device=device)
    times: dict[int | None, list[float]] = {limit: [] for limit in limits}
    for turn in range(rounds + 2):
        for limit in limits if turn % 2 else reversed(limits):
            cost = _call_us(lambda limit=limit: _reduce_and_wait(tensor, groups[limit]), device)
            if turn >= 2:  # the first two warm up
                times[limit].append(cost)
    _show(f"\nall_reduce of {_ELEMENTS} floats, issued and waited for, us a call")
    _show(f"{'group':16} {'median':>8} {'added':>8}")
    plain = times[None]
    for limit in limits:
        added = median(mine - other for mine, other in zip(times[limit], plain, strict=True))
        _show(f"{_label(inner, limit):16} {median(times[limit]):8.2f} {added:8.2f}")


def _reduce_and_wait(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()


def _call_us(call: Callable[[], None], device: torch.device) -> float:
    started_s = time.perf_counter()
    for _ in range(_CALLS):
        call()
    cost_us = (time.perf_counter() - started_s) / _CALLS * 1e6
    _synchronize(device)
    return cost_us


def _print_loads(device: torch.device, inner: str, mib: int) -> None:
    _show(f"\n{_CONCURRENT} all-reduces of {mib} MiB behind a busy device")
    _show(f"{'group':16} {'peak MiB':>9} {'issue ms':>9} {'total ms':>9} {'in flight':>10}")
    for limit in (None, -1, 8, 1):
        group = _group(inner, limit)
        _load(device, group, mib, 2)  # makes the communicator
        runs = [_load(device, group, mib, _CONCURRENT) for _ in range(3)]
        run = sorted(runs, key=lambda found: found.total_s)[1]
        most = "-" if not run.max_in_flight else str(run.max_in_flight)
        _show(
            f"{_label(inner, limit):16} {run.peak_bytes / 2**20:9.0f} {run.issue_s * 1e3:9.1f} "
            f"{run.total_s * 1e3:9.1f} {most:>10}"
        )
        dist.destroy_process_group(group)


def _load(device: torch.device, group: dist.ProcessGroup, mib: int, count: int) -> _Load:
    memory = _Memory(device)
    busy = torch.randn(4096 if device.type == "cuda" else 128, device=device).outer(
        torch.randn(4096 if device.type == "cuda" else 128, device=device)
    )
    _synchronize(device)
    memory.start()
    started_s = time.perf_counter()
    for _ in range(count):
        busy = (busy @ busy).clamp_(-1, 1)
        tensor = memory.watched(torch.full((mib * 2**18,), 1.0, device=device))
        tensor.add_(busy[0, 0])  # the all-reduce cannot start before the product
        dist.all_reduce(tensor, group=group, async_op=True)
        del tensor
    issued_s = time.perf_counter()
    _synchronize(device)
    ended_s = time.perf_counter()
    found, peak = counters(group), memory.peak()
    time.sleep(0.25)  # NCCL's watchdog looks ten times a second, and the next call then frees
    dist.all_reduce(busy[0, :1], group=group)
    _synchronize(device)
    return _Load(
        peak,
        issued_s - started_s,
        ended_s - started_s,
        None if found is None else found.max_in_flight,
    )


class _Memory:
    """Peak bytes: of the allocator on CUDA, of the watched tensors on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = self._peak = 0

    def start(self) -> None:
        self._held = self._peak = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)

    def watched(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            self._held += tensor.nbytes
            self._peak = max(self._peak, self._held)
            weakref.finalize(tensor.untyped_storage(), self._release, tensor.nbytes)
        return tensor

    def _release(self, size: int) -> None:
        self._held -= size

    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._held
        return self._peak


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
