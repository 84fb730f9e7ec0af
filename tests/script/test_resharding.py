"""Partial checkpoints load into a tensor group of another size, of other stages, or none."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp.errors import CheckpointError
from lightning_smp.script.partial import PARTIAL_KEY
from lightning_smp.script.resharding import (
    RECORDS_KEY,
    has_records,
    join_ranks,
    records_of,
    reslice,
)
from lightning_smp.tensor_parallel.record import Sharding
from tests.support.launch import run_ranks

_STEPS = 2
_WIDTH = 10  # neither 3 nor 4 divides it


def _splits(size: int) -> list[Sharding]:
    shape = (_WIDTH, 12)
    return [
        Sharding.split(shape, 0, size),
        Sharding.split(shape, 1, size, blocks=[4, 8]),
        Sharding.split(shape, 1, size, unit=3),
    ]


@pytest.mark.parametrize(("former", "wanted"), list(product((1, 2, 3, 4), repeat=2)))
def test_every_split_from_every_other(former: int, wanted: int) -> None:
    full = torch.arange(_WIDTH * 12.0).view(_WIDTH, 12)
    for old in _splits(former):
        shards = [old.shard(full, rank) for rank in range(former)]
        assert torch.equal(reslice(shards, old, None, 0), full)
        for new in _splits(wanted):
            for rank in range(wanted):
                assert torch.equal(reslice(shards, old, new, rank), new.shard(full, rank))


def test_parts_that_do_not_fit_are_errors() -> None:
    old = Sharding.split((4, 4), 0, 2)
    with pytest.raises(CheckpointError, match="records say"):
        reslice([torch.zeros(2, 4), torch.zeros(1, 4)], old, None, 0)
    with pytest.raises(CheckpointError, match="Build the model with the sizes"):
        reslice([torch.zeros(2, 4)] * 2, old, Sharding.split((6, 4), 0, 3), 0)


def test_objects_around_parts_and_states_are_joined() -> None:
    split = Sharding.split((5,), 0, 2)
    full, marks = torch.arange(5.0), {PARTIAL_KEY: False}

    def part(rank: int) -> Any:
        mine = split.shard(full, rank)
        state = {0: {"mean": mine, "step": torch.tensor(3.0)}, 1: {"mean": torch.ones(2)}}
        groups = [{"params": [0, 1]}]
        optimizer = {"state": state, "param_groups": groups, RECORDS_KEY: records_of({0: split})}
        model = {"a": mine, "b": torch.ones(1), RECORDS_KEY: records_of({"a": split})}
        return {"model": {**model, **marks}, "list": [{**optimizer, **marks}], "epoch": 4}

    objs = [part(0), part(1)]
    assert has_records(objs[0])
    joined = join_ranks(objs)
    assert not has_records(joined)
    assert torch.equal(joined["model"]["a"], full)
    assert torch.equal(joined["list"][0]["state"][0]["mean"], full)
    assert joined["list"][0]["state"][0]["step"] == 3
    assert joined["epoch"] == 4
    objs[0]["list"][0]["state"][0]["mean"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="'mean' has the shape"):
        join_ranks(objs)


# ---- runs --------------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.body = nn.Sequential(nn.Linear(8, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 8))
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


@smp.step
def _train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def _made(tp: int, stages: int, seed: int) -> tuple[Any, Any]:
    smp.init(
        {
            "partitions": stages, "tensor_parallel_degree": tp, "prescaled_batch": True,
            "microbatches": 2, "ddp": True,
        }
    )  # fmt: skip
    torch.manual_seed(seed)
    model = smp.DistributedModel(_Net().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    return model, optimizer


def _trained(model: Any, optimizer: Any, first: int) -> list[float]:
    losses = []
    for number in range(first, first + _STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        losses.append(_train_step(model, x, x.sum(1, keepdim=True)).reduce_mean().item())
        optimizer.step()
    return losses


def _first_half(rank: int, world_size: int, folder: str, tp: int, stages: int) -> list[float]:
    model, optimizer = _made(tp, stages, 3)
    _trained(model, optimizer, 0)
    smp.save_checkpoint(folder, "half", model=model, optimizer=optimizer, user_content=7)
    both = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(both, f"{folder}/both.pt", partial=True)
    smp.barrier()
    return _trained(model, optimizer, _STEPS)


def _second_half(rank: int, world_size: int, folder: str, tp: int, stages: int) -> Any:
    model, optimizer = _made(tp, stages, 100 + tp)  # other weights: they come from the files
    assert smp.resume_from_checkpoint(folder) == 7
    losses = _trained(model, optimizer, _STEPS)
    found = smp.load(f"{folder}/both.pt", partial=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return losses, _trained(model, optimizer, _STEPS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tp", "stages", "others"), [(2, 2, [(2, 2), (1, 1)]), (3, 1, [(1, 2), (2, 1)])]
)
def test_any_layout_goes_on_from_any_other(
    tp: int, stages: int, others: list[tuple[int, int]], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    (expected, *_) = run_ranks(_first_half, tp * stages, folder, tp, stages)
    for new_tp, new_stages in others:
        for losses, again in run_ranks(
            _second_half, new_tp * new_stages, folder, new_tp, new_stages
        ):
            assert losses == pytest.approx(expected, rel=1e-9), (new_tp, new_stages)
            assert again == pytest.approx(expected, rel=1e-9), (new_tp, new_stages)
