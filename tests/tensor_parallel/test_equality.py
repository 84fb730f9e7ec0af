"""Training with tensor parallelism equals one device: losses, weights and checkpoints."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_smp import SMPStrategy
from lightning_smp.tensor_parallel.module import distributed_modules
from tests.support.devices import ACCELERATOR, needs_devices
from tests.support.launch import run_ranks
from tests.tensor_parallel.models import MODELS, Data, Model

_GLOBAL_BATCH = 12
_STEPS = 3
_RESUMED = (True, "memory")  # the variant that also resumes, from the file of one device


class Layout(NamedTuple):
    """Degrees of one run."""

    tp: int
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


def train(model: Model, data: Data, *, ckpt_path: Path | None = None, **options: Any) -> pl.Trainer:
    """Train for some steps, with clipping."""
    settings: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "max_epochs": 1,
        "limit_train_batches": _STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.8,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = pl.Trainer(**{**settings, **options})
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def _reference(name: str, folder: Path) -> Model:
    model = Model(name)
    trainer = train(model, Data(_GLOBAL_BATCH), devices=1)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return model


def _rank(rank: int, world_size: int, layout: Layout, folder: Path) -> None:
    for prescaled, optimize, name in product((False, True), ("speed", "memory"), MODELS):
        shares = layout.dp * (1 if prescaled else layout.tp)
        strategy = SMPStrategy(
            tensor_parallel_degree=layout.tp, pipeline_parallel_degree=layout.pp,
            microbatches=1 if shares == _GLOBAL_BATCH else 3 if layout.pp > 1 else 1,
            prescaled_batch=prescaled, optimize=optimize,
        )  # fmt: skip
        model = Model(name)
        data = Data(_GLOBAL_BATCH // shares)
        trainer = train(model, data, devices=world_size, strategy=strategy)
        assert any(m.tp.size == layout.tp for _, m in distributed_modules(model))
        case = f"{name} prescaled={prescaled} {optimize}"
        trainer.save_checkpoint(folder / f"{case}.ckpt")
        losses = torch.tensor(model.losses, dtype=torch.float64)
        torch.save(losses, folder / f"{case} losses {rank}.pt")
        if (prescaled, optimize) == _RESUMED:
            model = Model(name)
            trainer = train(
                model, data, devices=world_size, max_epochs=2, ckpt_path=folder / f"{name}.ckpt",
                strategy=SMPStrategy(config=strategy.config.as_dict()),
            )  # fmt: skip
            trainer.save_checkpoint(folder / f"{name} resumed.ckpt")


def _compare(expected: Any, found: Any, where: str) -> None:
    """Compares checkpoints: everything that one device has."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-11, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key in expected:
            _compare(expected[key], found[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), where
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            _compare(one, other, f"{where}/{place}")
    else:
        assert expected == found, where


_LAYOUTS = {
    "tp2": Layout(2),
    "tp2-pp2": Layout(2, pp=2),
    "tp2-dp2": Layout(2, dp=2),
    "tp4": Layout(4),
}


@pytest.mark.timeout(320)
@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS.keys())
def test_training_equals_one_device(layout: Layout, tmp_path: Path) -> None:
    needs_devices(layout.world_size)
    references = {name: _reference(name, tmp_path) for name in MODELS}
    run_ranks(_rank, layout.world_size, layout, tmp_path, timeout=300)
    for name, reference in references.items():
        wanted = torch.load(tmp_path / f"{name}.ckpt", map_location="cpu", weights_only=False)
        for prescaled, optimize in product((False, True), ("speed", "memory")):
            case = f"{name} prescaled={prescaled} {optimize}"
            losses = [
                torch.load(tmp_path / f"{case} losses {rank}.pt")
                for rank in range(layout.world_size)
            ]
            torch.testing.assert_close(
                torch.stack(losses).mean(0),
                torch.tensor(reference.losses, dtype=torch.float64),
                rtol=1e-7, atol=1e-7, msg=lambda m, case=case: f"{case}: {m}",
            )  # fmt: skip
            found = torch.load(tmp_path / f"{case}.ckpt", map_location="cpu", weights_only=False)
            for part in ("state_dict", "optimizer_states"):
                _compare(wanted[part], found[part], f"{case} {part}")
        _check_resumed(name, tmp_path)


def _check_resumed(name: str, folder: Path) -> None:
    """One device goes on from the layout's file as the layout does from the file of one device."""
    model = Model(name)
    prescaled, optimize = _RESUMED
    path = folder / f"{name} prescaled={prescaled} {optimize}.ckpt"
    trainer = train(model, Data(_GLOBAL_BATCH), devices=1, max_epochs=2, ckpt_path=path)
    trainer.save_checkpoint(folder / "one device.ckpt")
    wanted = torch.load(folder / "one device.ckpt", map_location="cpu", weights_only=False)
    found = torch.load(folder / f"{name} resumed.ckpt", map_location="cpu", weights_only=False)
    assert found["global_step"] == 2 * _STEPS
    for part in ("state_dict", "optimizer_states"):
        _compare(wanted[part], found[part], f"{name} resumed {part}")
