"""The scenarios of scripts over NCCL: two stages, then two replicas, then float16."""

from __future__ import annotations

import pytest
import torch

from tests.script import scenarios, scenarios_replicas
from tests.script.test_scenarios import play
from tests.support.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

_ANY = [scenario.__name__ for scenario in scenarios.ANY_LAYOUT]
_REPLICAS = [
    scenario.__name__
    for scenario in (*scenarios_replicas.REPLICAS, *scenarios_replicas.ONE_STAGE_REPLICAS)
]


def test_two_stages() -> None:
    run_ranks(play, 2, {"partitions": 2, "microbatches": 4}, _ANY, timeout=200)


def test_two_replicas() -> None:
    run_ranks(play, 2, {"microbatches": 2, "ddp": True}, [*_ANY, *_REPLICAS], timeout=200)


def test_float16() -> None:
    config = {"partitions": 2, "microbatches": 2, "fp16": True}
    run_ranks(play, 2, config, ["half_precision"], timeout=200)
