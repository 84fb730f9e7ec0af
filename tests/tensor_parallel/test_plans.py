"""Models split by their own plans, by type and by name patterns train as on one device."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_smp import SMPStrategy
from tests.support.devices import ACCELERATOR, needs_devices
from tests.support.launch import run_ranks
from tests.tensor_parallel.pretrained import CASES, Samples, Trained

_GLOBAL_BATCH = 12
_STEPS = 3


class Layout(NamedTuple):
    """Degrees of one run, and what is trained in it."""

    tp: int
    pp: int
    dp: int
    prescaled: tuple[bool, ...]
    names: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def batch_size(self, *, prescaled: bool) -> int:
        """Samples that a rank loads for a step."""
        return _GLOBAL_BATCH // (self.dp * (1 if prescaled else self.tp))


_EITHER = (False, True)
_USUAL = ("gpt2", "llama", "bert", "t5", "vit")
_LAYOUTS = {
    "tp2": Layout(2, 1, 1, _EITHER, tuple(CASES)),
    "tp4": Layout(4, 1, 1, _EITHER, ("gpt2", "t5", "own")),
    "tp2-dp2": Layout(2, 1, 2, _EITHER, _USUAL),
    "tp2-pp2": Layout(2, 2, 1, _EITHER, _USUAL),
    "tp2-pp2-dp2": Layout(2, 2, 2, _EITHER, ("gpt2",)),  # tied, over two stages
}


def _train(model: Trained, data: Samples, **options: Any) -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = pl.Trainer(
            accelerator=ACCELERATOR, max_epochs=1, limit_train_batches=_STEPS, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=0.8, **options,
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
    return trainer


def _rank(rank: int, world_size: int, layout: Layout, folder: Path) -> None:
    for prescaled, name in product(layout.prescaled, layout.names):
        strategy = SMPStrategy(
            tensor_parallel_degree=layout.tp, pipeline_parallel_degree=layout.pp,
            microbatches=3 if layout.pp > 1 else 1, prescaled_batch=prescaled,
            tensor_parallel_modules=CASES[name].modules,
        )  # fmt: skip
        model = Trained(name)
        whole = {n: p.numel() for n, p in model.named_parameters()}
        data = Samples(layout.batch_size(prescaled=prescaled))
        trainer = _train(model, data, devices=world_size, strategy=strategy)
        smaller = [n for n, p in model.named_parameters() if p.numel() < whole[n]]
        assert len(smaller) >= len(whole) / 4
        state = trainer.strategy.lightning_module_state_dict()
        if rank == 0:
            torch.save(dict(state), folder / f"{name} {prescaled}.pt")
        torch.save(torch.tensor(model.losses), folder / f"{name} {prescaled} losses {rank}.pt")


@pytest.mark.timeout(320)
@pytest.mark.parametrize("layout", _LAYOUTS.values(), ids=_LAYOUTS.keys())
def test_training_equals_one_device(layout: Layout, tmp_path: Path) -> None:
    world_size = layout.world_size
    needs_devices(world_size)
    run_ranks(_rank, world_size, layout, tmp_path, timeout=300)
    for name in layout.names:
        reference = Trained(name)
        _train(reference, Samples(_GLOBAL_BATCH), devices=1)
        for prescaled in layout.prescaled:
            case = f"{name} {prescaled}"
            losses = [torch.load(tmp_path / f"{case} losses {r}.pt") for r in range(world_size)]
            torch.testing.assert_close(
                torch.stack(losses).mean(0), torch.tensor(reference.losses), rtol=1e-5, atol=1e-6,
                msg=lambda m, case=case: f"{case}: {m}",
            )  # fmt: skip
            found = torch.load(tmp_path / f"{case}.pt", map_location="cpu")
            wanted = reference.state_dict()
            assert found.keys() == wanted.keys()
            rtol = CASES[name].rtol
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key], value, rtol=rtol, atol=rtol / 10,
                    msg=lambda m, key=key, case=case: f"{case} {key}: {m}",
                )  # fmt: skip
