"""A script's scenarios on one device, stages and replicas; every rank asserts for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.script import scenarios, scenarios_half, scenarios_ranks, scenarios_replicas
from tests.support.launch import run_ranks

_PARTS = (scenarios, scenarios_half, scenarios_ranks, scenarios_replicas)


def play(rank: int, size: int, config: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    import lightning_smp as smp

    smp.init(config)
    took_s = {}
    for name in names:
        start_s = time.monotonic()
        try:
            next(getattr(part, name) for part in _PARTS if hasattr(part, name))()
        except Exception as error:
            raise AssertionError(f"scenario {name} on rank {rank} of {size}") from error
        took_s[name] = time.monotonic() - start_s
    return took_s


def _names(*lists: list[Callable[[], None]]) -> list[str]:
    return [scenario.__name__ for part in lists for scenario in part]


_ALL = scenarios.ANY_LAYOUT
_PLAIN = scenarios_replicas.ONE_STAGE_REPLICAS
_FOUR = [
    scenarios_replicas.join_mismatch, scenarios_replicas.join_without_a_first_step,
    scenarios_ranks.ranks_and_messages,
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "config", "names"),
    [
        pytest.param(1, {"microbatches": 2}, _names(_ALL), id="one"),
        pytest.param(
            2, {"partitions": 2, "microbatches": 4}, _names(_ALL), id="pp2",
        ),
        pytest.param(
            2, {"microbatches": 2, "ddp": True},
            _names(_ALL, scenarios_replicas.REPLICAS, _PLAIN), id="dp2",
        ),
        pytest.param(
            4, {"partitions": 2, "microbatches": 2, "ddp": True, "placement_strategy": "spread"},
            _names(_ALL, scenarios_replicas.REPLICAS, _FOUR), id="pp2-dp2",
        ),
        pytest.param(
            4, {"pipeline_parallel_degree": 4, "microbatches": 4, "pipeline": "simple"},
            _names(_ALL[:4]), id="pp4-simple",
        ),
        pytest.param(
            2, {"partitions": 2, "microbatches": 2, "fp16": True}, ["half_precision"], id="fp16",
        ),
    ],
)  # fmt: skip
def test_scenarios(size: int, config: dict[str, Any], names: list[str]) -> None:
    run_ranks(play, size, config, names, timeout=110)
