"""Ranks of a tensor group that take different branches around split modules get an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_smp as smp
from lightning_smp import SMPStrategy
from lightning_smp.calls import Calls
from lightning_smp.trail import Operation, Trail, digest_of, first_difference
from tests.support.launch import run_ranks_expect_failure
from tests.tensor_parallel.models import HIDDEN, NUM_TOKENS, Data, Model
from tests.tensor_parallel.test_equality import train

_BATCH = 6


class _Branches(nn.Module):
    """One rank goes another way in its second step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.steps = 0
        self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN)
        with smp.tensor_parallelism():
            self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        is_odd = self.steps == 1 and smp.tp_rank() == 1
        self.steps += 1
        if self.kind == "other" and is_odd:
            return self.head(self.second(self.second(x)))
        if self.kind == "skip" and is_odd:
            return self.head(self.second(x))
        return self.head(self.second(self.first(x)))


class _Diverging(Model):
    def __init__(self, kind: str) -> None:
        super().__init__("perceptron")
        self.net = _Branches(kind).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids = batch[0]
        return F.cross_entropy(self.net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _rank(rank: int, world_size: int, kind: str) -> None:
    strategy = SMPStrategy(tensor_parallel_degree=world_size, timeout=60.0)
    train(_Diverging(kind), Data(_BATCH), devices=world_size, strategy=strategy)


@pytest.mark.parametrize("kind", ["other", "skip"])
def test_other_branches_are_an_error_that_names_them(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    report = run_ranks_expect_failure(_rank, 2, kind, timeout=50)
    assert report.elapsed_s < 30
    assert all(outcome.exitcode != 0 or outcome.error for outcome in report.outcomes)
    said = capfd.readouterr().out + "".join(o.error or "" for o in report.outcomes)
    if kind == "other":
        assert "took different ways through split modules" in said
        assert "rank 0: all-to-all of 'net.first', rank 1: all-to-all of 'net.second'" in said
    else:
        assert "waits in" in said
        assert "of 'net." in said


def test_a_trail_is_compared_and_described() -> None:
    one, other = Trail(), Trail()
    one.names = other.names = ["", "net.mlp"]
    for trail in (one, other):
        trail.begin(Operation.ALL_GATHER, 0, 4, 4)
        trail.end()
        trail.at = 1
        trail.begin(Operation.REDUCE_SCATTER, 0, 4, 4)
    assert one.now == (1, 1, 0, 4, 4)
    mine, its = one.taken(), other.taken()
    assert digest_of(mine) == digest_of(its)
    assert one.taken() == []
    assert [one.describe(e) for e in mine] == [
        "all-gather of a split module", "reduce-scatter of 'net.mlp'",
    ]  # fmt: skip
    assert digest_of(mine) != digest_of(mine[:1])
    assert first_difference([["a", "b"], ["a"]]) == ["b", "nothing more"]
    assert "other shapes" in first_difference([["a"], ["a"]])[0]


def test_an_exchange_is_a_call_of_the_tensor_group() -> None:
    calls = Calls()
    assert calls.where() is calls.sheet
    with calls.collective("a step", "world"):
        outside = calls.where()
        calls.trail.begin(Operation.ALL_REDUCE, 5)
        inside: Any = calls.where()
        assert calls.where() is inside
        assert [call.text for call in inside.open] == ["a step", "all-reduce of a split module"]
        assert inside.open[1].axis == "tp"
        assert sum(inside.counts) == sum(outside.counts) + 1
        calls.trail.end()
        after = calls.where()
        assert after is not inside
        assert len(after.open) == 1
        assert after.serial > outside.serial
        with calls.collective("a reduction", "dp"):
            assert sum(calls.where().open[1].counts) == 3
    calls.restart()
    assert torch.tensor(calls.where().counts).sum() == 0
