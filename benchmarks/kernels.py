"""Prints one table: the CUDA kernels and what torch and others do for the same result.

    python -m benchmarks.kernels [--only cross_entropy,slices,buckets] [--library FILE]

Needs a CUDA device and the built extension. Times are medians of repetitions between device
events, contenders in turns, after a warm-up; inputs are random, and before each run something else
fills the caches. Before anything is timed, outputs are filled with NaN and each contender's result
is compared with a reference.

`ms` is what the device needs, with the host far enough ahead; `call` is the time of a call on an
idle device, launches included. `TB/s` is the bytes that must move (each input read once, each
output written once) over `ms`, and `of copy` its share of what a large device-to-device copy
reaches in the same process. `x ours` are both times over those of our kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks import kernel_cases
from benchmarks.kernel_cases import Contender
from lightning_smp.native.kernels.library import has_cuda_kernel
from lightning_smp.native.loading import load_kernels

__all__ = ["main"]

_COPY_BYTES = 4 * 2**30
_CLOCK_HZ = 2e9  # of the device, at most
_TIME_S = 0.15  # of one contender's repetitions
_MIN_REPEATS, _MAX_REPEATS = 5, 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what was asked for and writes the table to the standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--only", default="cross_entropy,slices,buckets")
    parser.add_argument("--library", help="the built extension, if it is not installed")
    options = parser.parse_args(arguments)
    if options.library:
        torch.ops.load_library(options.library)
    loaded = load_kernels()
    if not torch.cuda.is_available() or not has_cuda_kernel("pack_slices"):
        sys.exit(f"The kernels need a CUDA device and the built extension. {loaded.reason}")

    copy_tb_s = _copy_tb_s()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy of "
        f"{_COPY_BYTES / 2**30:.0f} GiB reads and writes {copy_tb_s:.2f} TB/s",
        "",
        "| kernel | size | contender | ms | TB/s | of copy | call, ms | x ours (ms, call) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in kernel_cases.cases(options.only.split(",")):
        lines += _rows(case, copy_tb_s)
        torch.cuda.empty_cache()
    sys.stdout.write("\n".join(lines) + "\n")


def _copy_tb_s() -> float:
    source = torch.randint(0, 2**31 - 1, (_COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = Contender(lambda: target.copy_(source), lambda: 0.0)
    return 2 * _COPY_BYTES / _medians_ms({"copy": copy}, ahead=True)["copy"] / 1e9


def _rows(case: kernel_cases.Case, copy_tb_s: float) -> list[str]:
    torch._dynamo.reset()
    contenders = case.make()
    notes = {name: _checked(case, contender) for name, contender in contenders.items()}
    runnable = {n: c for n, c in contenders.items() if not notes[n].startswith("fails")}
    times, calls = _medians_ms(runnable, ahead=True), _medians_ms(runnable, ahead=False)
    rows = []
    for name, note in notes.items():
        label = f"| {case.kernel} | {case.size} | {name}{note and ' (' + note + ')'} |"
        if name not in times:
            rows.append(f"{label} | | | | |")
            continue
        tb_s = case.moved_bytes / times[name] / 1e9
        ratios = f"{times[name] / times['ours']:.2f}, {calls[name] / calls['ours']:.2f}"
        rows.append(
            f"{label} {times[name]:.4f} | {tb_s:.2f} | {tb_s / copy_tb_s:.2f} | "
            f"{calls[name]:.4f} | {ratios} |"
        )
    return rows


def _checked(case: kernel_cases.Case, contender: Contender) -> str:
    """Runs a contender once; returns what is to be said about it, "" if all is well."""
    try:
        contender.prepare()
        contender.run()
        error = contender.error()
    except (RuntimeError, ImportError, ValueError) as problem:
        return f"fails: {str(problem).splitlines()[0][:60]}"
    return "" if error <= case.tolerance else f"off by {error:.1e}"


def _medians_ms(contenders: dict[str, Contender], *, ahead: bool) -> dict[str, float]:
    """Median time of each contender, in milliseconds, measured in turns.

    Args:
        contenders: what to measure.
        ahead: whether the device is kept busy before, until the host has launched everything.
    """
    repeats, waits_s = {}, {}
    for name, contender in contenders.items():
        ms, host_s = _first_times(contender)
        repeats[name] = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_TIME_S / (ms / 1e3 + host_s))))
        waits_s[name] = 1.5 * host_s + 1e-4 if ahead else 0.0
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(4):
        for name in list(contenders) if turn % 2 == 0 else list(reversed(contenders)):
            count = max(1, repeats[name] // 4)
            times[name] += _timed(contenders[name], count, waits_s[name])
    return {name: median(values) for name, values in times.items()}


def _first_times(contender: Contender) -> tuple[float, float]:
    """Warms up; returns the time of a run in milliseconds, and of its launches in seconds."""
    _timed(contender, 2, 0.0)
    contender.prepare()
    begin = time.perf_counter()
    contender.run()
    host_s = time.perf_counter() - begin
    return median(_timed(contender, 3, 0.0)), host_s


def _timed(contender: Contender, repeats: int, wait_s: float) -> list[float]:
    """Times of single runs, without what prepares them."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for before, after in events:
        contender.prepare()
        if wait_s:
            torch.cuda._sleep(int(wait_s * _CLOCK_HZ))
        before.record()
        contender.run()
        after.record()
        torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


if __name__ == "__main__":
    main()
