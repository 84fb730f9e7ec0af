"""Uneven batches are errors that name ranks; wrong reductions do not pass the equality test."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import SMPStrategy
from lightning_smp.errors import CommunicationError
from lightning_smp.weights.tensor_split import TensorSplit
from tests.support.launch import run_ranks
from tests.tensor_parallel.models import LENGTH, NUM_TOKENS, Data, Model
from tests.tensor_parallel.test_equality import train

_BATCH = 6


class _Uneven(Data):
    """Gives the ranks other lengths, or other numbers of batches."""

    def __init__(self, length: int, batches: int) -> None:
        super().__init__(_BATCH)
        self.size = (_BATCH * batches, length)

    def train_dataloader(self) -> DataLoader[Any]:
        ids = torch.randint(NUM_TOKENS, self.size, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(ids), batch_size=_BATCH)


def _uneven_rank(rank: int, world_size: int, cut: str) -> str:
    data = _Uneven(
        LENGTH - 1 if cut == "length" and rank == 1 else LENGTH,
        1 if cut == "batches" and rank == 1 else 2,
    )
    strategy = SMPStrategy(tensor_parallel_degree=world_size, timeout=40.0)
    with pytest.raises(CommunicationError) as caught:
        train(Model("perceptron"), data, devices=world_size, strategy=strategy,
              use_distributed_sampler=False)  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize("cut", ["length", "batches"])
def test_uneven_batches_are_errors_that_name_ranks_on_every_rank(cut: str) -> None:
    messages = run_ranks(_uneven_rank, 2, cut, timeout=35)
    for message in messages:
        assert "one tensor group are at different points or hold batches" in message
        assert "rank 0: ('training_step'" in message
        if cut == "length":
            assert f"[{_BATCH}, {LENGTH - 1}]" in message
        assert "prescaled_batch=True" in message


class _DrawsOnOneRank(Model):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            torch.rand(1)
        return super().training_step(batch, batch_idx)


def _drawing_rank(rank: int, world_size: int) -> str:
    strategy = SMPStrategy(tensor_parallel_degree=world_size, prescaled_batch=True, timeout=40.0)
    with pytest.raises(CommunicationError) as caught:
        train(_DrawsOnOneRank("perceptron"), Data(_BATCH), devices=world_size, strategy=strategy)
    return str(caught.value)


def test_ranks_of_one_batch_that_draw_differently_are_an_error() -> None:
    for message in run_ranks(_drawing_rank, 2, timeout=35):
        assert "random streams" in message
        assert "rank 0: ('training_step'" in message


def _faulty_rank(rank: int, world_size: int, folder: Path) -> None:
    faults: dict[str, tuple[bool, Any]] = {
        "none": (True, mock.patch.object(TensorSplit, "is_faulty", False, create=True)),
        "divisor": (True, mock.patch.object(TensorSplit, "group_factor", 1.0)),
        "group": (False, mock.patch.object(TensorSplit, "sees_group", return_value=False)),
    }
    for name, (prescaled, fault) in faults.items():
        strategy = SMPStrategy(tensor_parallel_degree=world_size, prescaled_batch=prescaled)
        model = Model("untied")
        batch = _BATCH if prescaled else _BATCH // world_size
        with fault:
            trainer = train(model, Data(batch), devices=world_size, strategy=strategy)
            trainer.save_checkpoint(folder / name)


def test_a_wrong_divisor_and_a_wrong_group_are_noticed(tmp_path: Path) -> None:
    run_ranks(_faulty_rank, 2, tmp_path)
    wanted = Model("untied")
    train(wanted, Data(_BATCH), devices=1)
    errors = {}
    for name in ("none", "divisor", "group"):
        found = torch.load(tmp_path / name, weights_only=False)["state_dict"]
        errors[name] = max(
            float((found[key] - value).abs().max()) for key, value in wanted.state_dict().items()
        )
    assert errors["none"] < 1e-10
    assert min(errors["divisor"], errors["group"]) > 1e-4
