"""Checkpoint files equal those of one device, and training goes on from them in any layout.

Every model is trained for two epochs on one device and in each layout; all of a layout's runs share
one start of the ranks. Checkpoints are compared whole: weights, optimizer states, schedulers, loops
and callbacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.equality.case import NUM_CLASSES, NUM_FEATURES, SEED, as_loss, block, points, tokens
from tests.equality.zoo_text import GPT
from tests.support.launch import run_ranks

pytestmark = pytest.mark.timeout(240)

_GLOBAL_BATCH = 8
_BATCHES = 4  # of an epoch
_RUN_TIMEOUT_S = 150


class Layout(NamedTuple):
    """Degrees of one run."""

    pp: int
    dp: int
    microbatches: int

    def __str__(self) -> str:
        return f"pp{self.pp}-dp{self.dp}-mb{self.microbatches}"


LAYOUTS = [Layout(1, 1, 2), Layout(2, 1, 2), Layout(4, 1, 4), Layout(1, 2, 1), Layout(2, 2, 2)]


class Classifier(pl.LightningModule):
    """Blocks and a head; its hyperparameters are in its checkpoints."""

    def __init__(self, depth: int = 3, freeze: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(block() for _ in range(depth)), nn.Linear(NUM_FEATURES, NUM_CLASSES)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.full((NUM_CLASSES,), 0.5))
        self.double()
        if freeze:
            self.net[1].requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = as_loss(self.net(x) * self.scale + self.shift, y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", as_loss(self.net(x) * self.scale + self.shift, y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [
                {"params": [self.scale, *self.net[-1].parameters()], "lr": 0.02},
                {"params": list(self.net[:-1].parameters()), "weight_decay": 0.01},
            ],
            lr=0.05,
            momentum=0.9,
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class TiedGPT(GPT):
    """A decoder whose head shares the embedding's weight, with AdamW and a schedule by steps."""

    def __init__(self) -> None:
        super().__init__("shared")
        self.double()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        ids = batch["input_ids"]
        loss = nn.functional.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Keys' biases have gradients of zero but for rounding, which a small eps would magnify.
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4, amsgrad=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 6)


class Recipe(NamedTuple):
    """A model, its data and the Trainer's arguments."""

    build: Callable[[], pl.LightningModule]
    data: Callable[[int], Any]
    trainer: Mapping[str, Any]


RECIPES = {
    "classifier": Recipe(Classifier, points, {"accumulate_grad_batches": 2}),
    "frozen": Recipe(lambda: Classifier(freeze=True), points, {"gradient_clip_val": 0.5}),
    "gpt": Recipe(TiedGPT, tokens, {}),
}


class Ordered(pl.LightningDataModule):
    """The same global batches in every layout."""

    def __init__(self, recipe: Recipe, dp: int) -> None:
        super().__init__()
        self.recipe, self.dp = recipe, dp

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        data = self.recipe.data(_GLOBAL_BATCH * _BATCHES)
        replica = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(data, shuffle=False, **replica) if replica else None
        return DataLoader(data, batch_size=_GLOBAL_BATCH // self.dp, sampler=sampler)

    val_dataloader = train_dataloader


def _fit(name: str, layout: Layout | None, folder: Path, **fit: Any) -> pl.Trainer:
    """Trains to the end of the second epoch, with a checkpoint of each epoch in the folder."""
    recipe, strategy, devices = RECIPES[name], "auto", 1
    if layout is not None:
        from lightning_smp import SMPStrategy

        strategy = SMPStrategy(pipeline_parallel_degree=layout.pp, microbatches=layout.microbatches)
        devices = layout.pp * layout.dp
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        **recipe.trainer,
    )
    data = Ordered(recipe, layout.dp if layout else 1)
    trainer.fit(recipe.build(), datamodule=data, **fit)
    return trainer


# ---- what the ranks run -----------------------------------------------------------------------


def _train_and_resume(rank: int, world_size: int, layout: Layout, folder: Path) -> None:
    """Trains every model from the start, and from one device's first epoch."""
    for name in RECIPES:
        mine = folder / str(layout) / name
        _fit(name, layout, mine)
        source = folder / "one" / name / "epoch=0.ckpt"
        _fit(name, layout, mine / "resumed", ckpt_path=source, weights_only=True)


def _resume_from(rank: int, world_size: int, layout: Layout, source: Layout, folder: Path) -> None:
    for name in RECIPES:
        path = folder / str(source) / name / "epoch=0.ckpt"
        _fit(name, layout, folder / str(layout) / name / "moved", ckpt_path=path)


def _keep_best(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Trains with top-k and a link to the last file, then uses the best one."""
    from lightning_smp import SMPStrategy

    return [_best(SMPStrategy(pipeline_parallel_degree=2, microbatches=2), 2, folder)]


def _best(strategy: Any, devices: int, folder: Path) -> dict[str, Any]:
    pl.seed_everything(SEED, verbose=False)
    keeper = ModelCheckpoint(
        folder, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last="link"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeper],
    )
    data = Ordered(RECIPES["classifier"], 1)
    trainer.fit(Classifier(), datamodule=data)
    best = trainer.validate(ckpt_path="best", datamodule=data, verbose=False)
    trainer.save_checkpoint(folder / "light" / "weights.ckpt", weights_only=True)
    return {
        "best": Path(keeper.best_model_path).name,
        "score": float(keeper.best_model_score),
        "validated": best[0]["val_loss"],
        "kept": sorted(Path(path).name for path in keeper.best_k_models),
    }


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one device has trained every model."""
    folder = tmp_path_factory.mktemp("resume")
    for name in RECIPES:
        _fit(name, None, folder / "one" / name)
    return folder


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest, folder: Path) -> Layout:
    """A layout that has trained every model."""
    found: Layout = request.param
    _train_in(found, folder)
    return found


def _train_in(layout: Layout, folder: Path) -> None:
    if not (folder / str(layout)).exists():
        ranks = layout.pp * layout.dp
        run_ranks(_train_and_resume, ranks, layout, folder, timeout=_RUN_TIMEOUT_S)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _differences(expected: Any, actual: Any, where: str = "") -> Iterator[str]:
    """Yields where two checkpoints differ, but for the folder in paths."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        same = expected.shape == actual.shape and expected.dtype == actual.dtype
        # Metrics are float32 whatever the model's precision.
        rtol = 1e-6 if expected.dtype == torch.float32 else 1e-9
        if not same or not torch.allclose(expected, actual, rtol=rtol, atol=1e-11):
            yield f"{where}: {actual} for {expected}"
    elif isinstance(expected, dict) and isinstance(actual, dict):
        if list(map(_bare, expected)) != list(map(_bare, actual)):
            yield f"{where}: keys {list(actual)} for {list(expected)}"
            return
        for key, value, other in zip(expected, expected.values(), actual.values(), strict=True):
            yield from _differences(value, other, f"{where}/{_bare(key)}")
    elif isinstance(expected, list | tuple) and type(expected) is type(actual):
        if len(expected) != len(actual):
            yield f"{where}: {len(actual)} items for {len(expected)}"
        for index, pair in enumerate(zip(expected, actual, strict=False)):
            yield from _differences(*pair, f"{where}/{index}")
    elif _bare(expected) != _bare(actual):
        yield f"{where}: {actual!r} for {expected!r}"


def _bare(value: Any) -> Any:
    return os.path.basename(value) if isinstance(value, str) and os.sep in value else value


def _require_equal(expected: Path, actual: Path, *, without_callbacks: bool = False) -> None:
    first, second = _load(expected), _load(actual)
    if without_callbacks:  # which know when and where the run they belong to began
        first.pop("callbacks"), second.pop("callbacks")
    differences = list(_differences(first, second))
    assert not differences, "\n".join(differences)


# ---- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_files_are_those_of_one_device(name: str, layout: Layout, folder: Path) -> None:
    for file in ("epoch=0.ckpt", "epoch=1.ckpt"):
        _require_equal(folder / "one" / name / file, folder / str(layout) / name / file)


@pytest.mark.parametrize("name", RECIPES)
def test_resumes_from_one_device(name: str, layout: Layout, folder: Path) -> None:
    resumed = folder / str(layout) / name / "resumed" / "epoch=1.ckpt"
    _require_equal(folder / "one" / name / "epoch=1.ckpt", resumed, without_callbacks=True)


@pytest.mark.parametrize("name", RECIPES)
def test_one_device_resumes(name: str, layout: Layout, folder: Path, tmp_path: Path) -> None:
    _fit(name, None, tmp_path, ckpt_path=folder / str(layout) / name / "epoch=0.ckpt")
    expected = folder / "one" / name / "epoch=1.ckpt"
    _require_equal(expected, tmp_path / "epoch=1.ckpt", without_callbacks=True)


def test_module_loads_from_the_file(layout: Layout, folder: Path) -> None:
    loaded = Classifier.load_from_checkpoint(folder / str(layout) / "frozen" / "epoch=1.ckpt")
    assert loaded.hparams["freeze"] is True
    expected = _load(folder / "one" / "frozen" / "epoch=1.ckpt")["state_dict"]
    assert not list(_differences(dict(expected), dict(loaded.state_dict())))
    tied = TiedGPT.load_from_checkpoint(folder / str(layout) / "gpt" / "epoch=1.ckpt")
    assert tied.head.weight is tied.embed.weight


@pytest.mark.parametrize("turn", range(len(LAYOUTS)), ids=lambda turn: str(LAYOUTS[turn]))
def test_resumes_at_other_degrees(turn: int, folder: Path) -> None:
    layout, source = LAYOUTS[turn], LAYOUTS[turn - 1]
    _train_in(source, folder)
    ranks = layout.pp * layout.dp
    run_ranks(_resume_from, ranks, layout, source, folder, timeout=_RUN_TIMEOUT_S)
    for name in RECIPES:
        moved = folder / str(layout) / name / "moved" / "epoch=1.ckpt"
        _require_equal(folder / "one" / name / "epoch=1.ckpt", moved, without_callbacks=True)


def test_best_and_last_files_are_kept(tmp_path: Path) -> None:
    expected = _best("auto", 1, tmp_path / "one")
    results = run_ranks(_keep_best, 2, tmp_path / "smp", timeout=_RUN_TIMEOUT_S)
    for (result,) in results:
        assert result["best"] == expected["best"]
        assert result["kept"] == expected["kept"]
        assert result["score"] == pytest.approx(expected["score"])
        assert result["validated"] == pytest.approx(expected["score"])
    names = sorted(path.name for path in (tmp_path / "smp").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir())
    last = tmp_path / "smp" / "last.ckpt"
    assert last.is_symlink()
    assert last.resolve().parent == (tmp_path / "smp").resolve()
    light = [_load(tmp_path / run / "light" / "weights.ckpt") for run in ("one", "smp")]
    assert not list(_differences(*light))
    assert "optimizer_states" not in light[1]
