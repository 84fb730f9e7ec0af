"""What a step keeps alive, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.placed.random import seed_everywhere
from tests.placed.rig import Rig, samples
from tests.placed.steps import ALTERNATING, HALVES, Chain, chain_loss
from tests.support.launch import gloo_group, run_ranks


class Watched(nn.Module):
    """A unit whose activations and results are followed by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.refs: dict[str, list[weakref.ref[Tensor]]] = {"inner": [], "result": []}
        self.most_alive = 0

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(x @ self.weight)
        result = inner.square() + 1
        self.refs["inner"].append(weakref.ref(inner))  # saved by square()
        self.refs["result"].append(weakref.ref(result))
        self.most_alive = max(self.most_alive, self.alive("inner"))
        return result

    def alive(self, kind: str) -> int:
        return sum(ref() is not None for ref in self.refs[kind])


class WatchedChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = Watched()  # type: ignore[assignment]


def _counts(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with gloo_group(60):
        for layout, stages in {"chain": HALVES, "ping-pong": ALTERNATING}.items():
            seed_everywhere(11, torch.device("cpu"))
            model = WatchedChain()
            unit: Any = model.b
            rig = Rig(model, stages, active_microbatches=2)
            for number, microbatches in enumerate(samples(2, 8)):
                unit.most_alive = 0
                gc.disable()  # cycles must not be what keeps activations alive
                rig.train(chain_loss, microbatches)
                gc.enable()
                key = f"{layout}, step {number}"
                found[key] = (unit.most_alive, unit.alive("inner"), unit.alive("result"))
                found[f"{key}, sends"] = len(rig.channels._sends)
                found[f"{key}, ran"] = len(unit.refs["inner"])
    return found


@pytest.fixture(scope="module")
def counts() -> list[dict[str, Any]]:
    return run_ranks(_counts, 2, timeout=60)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("layout", ["chain", "ping-pong"])
def test_activations_end_with_their_backward(layout: str, counts: list[dict[str, Any]]) -> None:
    home = 0 if layout == "chain" else 1
    assert counts[home][f"{layout}, step 1, ran"] == 16
    most_alive, inner, results = counts[home][f"{layout}, step 1"]
    assert most_alive <= 3  # two in flight, and the one that has just been made
    assert (inner, results) == (0, 0)
    assert counts[home][f"{layout}, step 0"][1:] == (0, 0)


@pytest.mark.timeout(90)
def test_sent_tensors_end_with_the_step(counts: list[dict[str, Any]]) -> None:
    assert [rank[key] for rank in counts for key in rank if key.endswith("sends")] == [0] * 8
