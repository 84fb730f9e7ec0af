"""Prints what a pipelined step costs beside its maths, against torch.distributed.pipelining.

    python -m benchmarks.pipeline [--quick] [--only tiny,heavy,placed]

See benchmarks/README.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measure import run_two_ranks
from benchmarks.placed_host import placed_host_cost
from benchmarks.two_stage import Setting, compare_steps

__all__ = ["main"]

_TINY = Setting(schedule="1F1B", width=32, rows=4, layers=6, microbatches=8, rounds=15, repeats=4)
_HEAVY = replace(_TINY, width=512, rows=128, layers=6, rounds=11, repeats=1)
_LAYERS = 48

_MOST_US = 150.0
"""Microseconds of overhead a microbatch."""

_LIMITS: dict[tuple[str, str], dict[str, float]] = {
    ("tiny", "1F1B"): {"ratio": 1.0, "overhead": _MOST_US},
    ("tiny", "2 chunks"): {"ratio": 0.5, "overhead": _MOST_US},
    ("heavy", "1F1B"): {"1 - smp eff": 0.03, "wall ratio": 1.0},
    ("heavy", "2 chunks"): {"1 - smp eff": 0.03, "wall ratio": 1.0},
}
"""What each table is for: by kind of stage and schedule, the most that a figure may be."""

Rounds = list[dict[str, dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", default="tiny,heavy,placed", help="parts to run, by comma")
    parser.add_argument("--schedules", default="1F1B,GPipe,2 chunks", help="by comma")
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    for name, setting in (("tiny", _TINY), ("heavy", _HEAVY)):
        if name in parts:
            rounds = 5 if options.quick else setting.rounds
            _two_stage(name, replace(setting, rounds=rounds), options.schedules.split(","))
    if "placed" in parts:
        _placed(rounds=7 if options.quick else 15)


def _two_stage(name: str, setting: Setting, schedules: Sequence[str]) -> None:
    _write(
        f"\n{name} stage: {setting.layers} x Linear({setting.width}) + tanh, {setting.rows} rows a "
        f"microbatch, {setting.microbatches} microbatches, {setting.rounds} rounds of "
        f"{setting.repeats} steps"
    )
    columns = ("schedule", "maths", "p2p", "smp", "torch", "by hand", "ratio", "smp wall",
               "torch wall", "wall ratio", "smp eff", "torch eff")  # fmt: skip
    _write(_row(columns))
    for schedule in schedules:
        ranks = run_two_ranks(compare_steps, replace(setting, schedule=schedule))
        figures, verdict = _two_stage_figures(ranks, replace(setting, schedule=schedule), name)
        _write(_row((schedule, *figures)) + f"  {verdict}")


def _two_stage_figures(ranks: list[Any], setting: Setting, name: str) -> tuple[list[str], str]:
    """The columns, and what of the targets is missed."""
    rounds = _by_round(ranks)
    microbatches = setting.microbatches
    contenders = [name for name in ("smp", "torch", "by hand") if name in rounds[0]]
    overhead = {k: _median(rounds, partial(_overhead, name=k)) for k in contenders}
    ratio = _median(rounds, lambda r: _overhead(r, "smp") / _overhead(r, "torch"))
    wall_ratio = _median(rounds, lambda r: r["smp"]["wall_us"] / r["torch"]["wall_us"])
    chunks = setting.num_stages // 2
    filled = microbatches / (microbatches + 1 / chunks)  # m / (m + (p - 1) / v)

    def efficiency(name: str) -> float:
        """The ideal step (maths through a pipeline of two ranks) over the measured one."""
        return _median(rounds, lambda r: r["maths"]["wall_us"] / filled / r[name]["wall_us"])

    limits = _LIMITS.get((name, setting.schedule), {})
    measured = {
        "ratio": ratio, "overhead": overhead["smp"], "wall ratio": wall_ratio,
        "1 - smp eff": 1 - efficiency("smp"),
    }  # fmt: skip
    columns = [
        f"{_median(rounds, lambda r: r['maths']['cpu_us']):.0f}",
        f"{_median(rounds, lambda r: r['messages']['cpu_us']):.0f}",
        f"{overhead['smp']:.0f}", f"{overhead['torch']:.0f}",
        f"{overhead['by hand']:.0f}" if "by hand" in overhead else "", f"{ratio:.2f}",
        f"{_median(rounds, lambda r: r['smp']['wall_us']):.0f}",
        f"{_median(rounds, lambda r: r['torch']['wall_us']):.0f}",
        f"{wall_ratio:.2f}", f"{efficiency('smp'):.3f}", f"{efficiency('torch'):.3f}",
    ]  # fmt: skip
    return columns, _verdict(measured, limits)


def _verdict(measured: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """Which targets are missed."""
    missed = [f"{name} > {limit:g}" for name, limit in limits.items() if measured[name] > limit]
    if not limits:
        return ""
    return f"missed: {', '.join(missed)}" if missed else "targets met"


def _placed(*, rounds: int) -> None:
    _write(f"\nplaced execution: a rank owns 1 of {_LAYERS} layers; CPU microseconds a forward")
    _write(_row(("model", "whole", "layer", "outer", "placed")))
    for family in ("gpt2", "llama"):
        rank = run_two_ranks(placed_host_cost, family, _LAYERS, rounds)[1]
        per_round = [{k: rank[k][i]["cpu_us"] for k in rank} for i in range(len(rank["smp"]))]
        columns = [median(r[k] for r in per_round) for k in ("smp", "maths", "outer")]
        placed = median(r["smp"] - r["maths"] - r["outer"] for r in per_round)
        verdict = _verdict({"placed": placed}, {"placed": _MOST_US})
        _write(_row((family, *(f"{value:.0f}" for value in (*columns, placed)))) + f"  {verdict}")


def _by_round(ranks: list[Any]) -> Rounds:
    """Per round and contender the mean over the ranks; the maths' wall time is the slower one's."""
    one, other = ranks
    return [
        {
            name: {
                "cpu_us": (one[name][i]["cpu_us"] + other[name][i]["cpu_us"]) / 2,
                "wall_us": max(one[name][i]["wall_us"], other[name][i]["wall_us"]),
            }
            for name in one
        }
        for i in range(len(one["smp"]))
    ]


def _overhead(costs: dict[str, dict[str, float]], name: str) -> float:
    return costs[name]["cpu_us"] - costs["maths"]["cpu_us"] - costs["messages"]["cpu_us"]


def _median(rounds: Rounds, figure: Callable[[dict[str, dict[str, float]]], float]) -> float:
    return median(map(figure, rounds))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:10s}" + "".join(f"{cell:>11s}" for cell in cells[1:])


if __name__ == "__main__":
    main()
