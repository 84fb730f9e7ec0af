"""`smp.save_checkpoint` and `smp.resume_from_checkpoint` in all layouts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp.errors import CheckpointError, ConfigError
from tests.support.launch import run_ranks

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@smp.step
def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def made(stages: int) -> tuple[Any, Any]:
    smp.init({"partitions": stages, "microbatches": 2, "ddp": True})
    torch.manual_seed(3 + 100 * (stages != 1))  # weights of a resumed run come from the file
    model = smp.DistributedModel(Net().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    return model, optimizer


def trained(model: Any, optimizer: Any, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        losses.append(train_step(model, x, x.sum(1, keepdim=True)).reduce_mean().item())
        optimizer.step()
    return losses


def first_half(rank: int, world_size: int, folder: str, stages: int) -> list[float]:
    """Trains, saves a checkpoint of each kind, and goes on."""
    model, optimizer = made(stages)
    content = {"steps": STEPS, "numbers": torch.arange(3)}
    trained(model, optimizer)
    for number in (1, 2):
        smp.save_checkpoint(
            folder, tag=f"old_{number}", model=model, optimizer=optimizer, user_content=number,
            num_kept_partial_checkpoints=2,
        )  # fmt: skip
    smp.save_checkpoint(folder, "whole.pt", partial=False, model=model, user_content=content)
    smp.save_checkpoint(
        folder, "step_3", partial=True, model=model, optimizer=optimizer, user_content=content,
        num_kept_partial_checkpoints=2,
    )  # fmt: skip
    return trained(model, optimizer, STEPS)


def resumed(rank: int, world_size: int, folder: str, stages: int) -> list[float]:
    model, optimizer = made(stages)
    content = smp.resume_from_checkpoint(folder)
    assert content["steps"] == STEPS
    assert content["numbers"].tolist() == [0, 1, 2]
    return trained(model, optimizer, STEPS)


def without_optimizer(rank: int, world_size: int, folder: str) -> list[float]:
    model, optimizer = made(1)
    smp.resume_from_checkpoint(folder, load_optimizer_states=False)
    return trained(model, optimizer, STEPS)


def resumed_whole(rank: int, world_size: int, folder: str, stages: int) -> list[float]:
    """A full checkpoint has no optimizer; with another name for a layer it is translated."""

    def translate(states: dict[str, Any]) -> dict[str, Any]:
        assert "head.weight" in states
        return {name: value * 1 for name, value in states.items()}

    model, optimizer = made(stages)
    content = smp.resume_from_checkpoint(
        folder, tag="whole.pt", partial=False, load_optimizer=False, translate_function=translate
    )
    assert content["steps"] == STEPS
    return trained(model, optimizer, STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A folder that two stages wrote to, and their losses after that."""
    path = str(tmp_path_factory.mktemp("checkpoints"))
    losses = run_ranks(first_half, 4, path, 2)  # two replicas, of equal data
    assert all(other == losses[0] for other in losses)
    return path, losses[0]


def test_layout_on_disk(folder: tuple[str, list[float]]) -> None:
    path = Path(folder[0])
    assert {file.name for file in path.iterdir()} == {
        "newest", "old_2_partial", "step_3_partial", "whole.pt", "user_content_whole.pt",
    }  # fmt: skip
    assert {file.name for file in (path / "step_3_partial").iterdir()} == {
        "layout.pt", "model_0.pt", "model_1.pt", "optimizer_0.pt", "optimizer_1.pt",
        "user_content.pt",
    }  # fmt: skip
    assert (path / "newest").read_text() == "step_3_partial"
    whole = torch.load(path / "whole.pt", weights_only=True)
    Net().double().load_state_dict(whole)
    parts = [
        torch.load(path / f"step_3_partial/model_{stage}.pt", weights_only=True) for stage in (0, 1)
    ]
    assert all(part.pop("_smp_is_partial") is True for part in parts)
    assert not set(parts[0]) & set(parts[1])
    assert set(parts[0]) | set(parts[1]) == set(whole)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_partial_checkpoint_resumes(stages: int, folder: tuple[str, list[float]]) -> None:
    for losses in run_ranks(resumed, stages, folder[0], stages):
        assert losses == pytest.approx(folder[1], rel=1e-9)


def test_optimizer_is_left_out_when_asked(folder: tuple[str, list[float]]) -> None:
    [losses] = run_ranks(without_optimizer, 1, folder[0])
    assert losses[0] == pytest.approx(folder[1][0], rel=1e-9)
    assert losses[1] != pytest.approx(folder[1][1], rel=1e-3)


def test_full_checkpoint_resumes_the_model(folder: tuple[str, list[float]]) -> None:
    results = [run_ranks(resumed_whole, stages, folder[0], stages)[0] for stages in (1, 2)]
    assert results[0][0] == pytest.approx(folder[1][0], rel=1e-9)
    assert results[0] == pytest.approx(results[1], rel=1e-9)
    assert results[0] != pytest.approx(folder[1], rel=1e-9)  # the optimizer began anew


def refusals(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = made(2)
    with pytest.raises(ConfigError, match="neither"):
        smp.save_checkpoint(folder, "x")
    with pytest.raises(ConfigError, match="num_kept"):
        smp.save_checkpoint(folder, "x", model=model, num_kept_partial_checkpoints=0)
    with pytest.raises(ConfigError, match="model only"):
        smp.save_checkpoint(folder, "x", partial=False, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="newest"):
        smp.resume_from_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no partial checkpoint"):
        smp.resume_from_checkpoint(folder, tag="x")
    trained(model, optimizer)
    smp.save_checkpoint(folder, "good", model=model, user_content=Namespace(lr=1))
    with pytest.raises(CheckpointError, match="weights_only=False"):
        smp.resume_from_checkpoint(folder)
    assert smp.resume_from_checkpoint(folder, weights_only=False).lr == 1
    part = {"head.weight": torch.ones(1, 6, dtype=torch.float64)}
    smp.save(part, f"{folder}/little", partial=False)
    smp.barrier()
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        smp.resume_from_checkpoint(folder, tag="little", partial=False)
    assert smp.resume_from_checkpoint(folder, tag="little", partial=False, strict=False) == {}
    assert model.state_dict()["head.weight"].tolist() == [[1.0] * 6]
    blocked = f"{folder}/file"
    if rank == 0:
        Path(blocked).write_text("")
    smp.barrier()
    with pytest.raises(CheckpointError, match="rank 0: "):  # every rank hears of it
        smp.save_checkpoint(blocked, "x", model=model)
    broken = Namespace(local_state_dict=lambda: {"unsavable": lambda: 1} if rank else {})
    with pytest.raises(CheckpointError, match="rank 1: "):
        smp.save_checkpoint(folder, "good", model=broken)
    assert smp.resume_from_checkpoint(folder, tag="good", weights_only=False).lr == 1
    smp.barrier()
    (Path(folder) / "good_partial" / f"model_{rank}.pt").unlink()
    smp.barrier()
    with pytest.raises(CheckpointError, match="model_0"):  # all are gone: not "none was saved"
        smp.resume_from_checkpoint(folder, tag="good", weights_only=False)


def test_refusals_and_failures(tmp_path: Path) -> None:
    run_ranks(refusals, 2, str(tmp_path))
