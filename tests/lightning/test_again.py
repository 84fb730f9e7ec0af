"""Several Trainers in one process: nothing grows, and after an error they go on or say why not."""

from __future__ import annotations

import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.launch import run_ranks, run_ranks_expect_failure

pytestmark = pytest.mark.timeout(150)

_WORDS = "the user's own words"
_TIMEOUT_S = 60.0  # of a run, far above the bound
_BOUND_S = 25.0  # generous, for busy machines; a few seconds are usual
_BATCH = 2  # the batch in which something goes wrong
_FEATURES = 4
_TRAINERS = 5
_ENDING = (
    2  # threads and files of a run may be on their way to their end; each would leave 3 or more
)


class Unit(nn.Module):
    """A unit that goes wrong where it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(_FEATURES))
        self.fails = [False]

    def forward(self, x: Tensor) -> Tensor:
        if self.fails[0] and type(x) is Tensor:  # not an analysis
            raise ValueError(_WORDS)
        return x @ self.weight


class Model(pl.LightningModule):
    """Linear layers, of which the first may come again at the end.

    Args:
        where: the place where it goes wrong.
        rank: where it does; None for all.
        batch: when it does.
        again: whether the first layer comes again.
    """

    def __init__(
        self, where: str = "", rank: int | None = None, batch: int = _BATCH, *, again: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_FEATURES, _FEATURES) for _ in range(4))
        self.last = Unit()
        self.where, self.rank, self.batch, self.again = where, rank, batch, again
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.last(x)
        return self.layers[0](x) if self.again else x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.go("before", batch_idx)
        self.last.fails[0] = self.where == "unit" and batch_idx == self.batch
        loss = self(batch).pow(2).mean()
        self.go("after", batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.go("validation", batch_idx + _BATCH)
        self.log("val_loss", self(batch).pow(2).mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.go("hook", batch_idx)

    def on_fit_end(self) -> None:
        self.go("end", self.batch)

    def go(self, where: str, batch_idx: int) -> None:
        chosen = self.rank in (None, self.global_rank)
        if where == self.where and batch_idx == self.batch and chosen:
            raise ValueError(_WORDS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Trainers:
    """Makes a new Trainer at each call; on one device without the strategy.

    Args:
        stages: 0 for one device.
        size: number of ranks.
        options: of the Trainers.
    """

    def __init__(self, stages: int, size: int, **options: Any) -> None:
        self.stages, self.size, self.options = stages, size, options

    def __call__(self) -> pl.Trainer:
        from lightning_smp import SMPStrategy

        strategy: Any = "auto"
        if self.stages:
            strategy = SMPStrategy(
                pipeline_parallel_degree=self.stages, microbatches=2, timeout=_TIMEOUT_S
            )
        return pl.Trainer(
            accelerator="cpu", devices=self.size, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, use_distributed_sampler=False, **self.options,
        )  # fmt: skip


def _loader() -> DataLoader[Tensor]:
    data = torch.randn(
        16, _FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    return DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


def _model(*args: Any, **options: Any) -> Model:
    torch.manual_seed(1)
    return Model(*args, **options)


# ---- what is kept --------------------------------------------------------------------------------


class Held(NamedTuple):
    """What this process holds."""

    threads: int
    files: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return cls(int(status.split("Threads:")[1].split()[0]), len(os.listdir("/proc/self/fd")))


def _sweep(rank: int, size: int, stages: int, folder: str) -> list[Held]:
    make = Trainers(stages, size)
    held, losses, former = [], [], None
    for number in range(_TRAINERS):
        trainer = make()
        trainer.fit(_model(again=True), _loader())
        losses.append(float(trainer.callback_metrics["loss"]))
        if former is not None:  # after its successor's run
            former.save_checkpoint(Path(folder, f"{number}.ckpt"))
        former = trainer
        held.append(Held.now())
    assert losses == losses[:1] * _TRAINERS
    return held


@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_grows_with_the_number_of_trainers(stages: int, tmp_path: Path) -> None:
    for held in run_ranks(_sweep, 2, stages, str(tmp_path), timeout=120):
        _, second, *_, last = held
        assert last.threads <= second.threads + _ENDING, held
        assert last.files <= second.files + _ENDING, held
    saved = [torch.load(path, weights_only=False) for path in sorted(tmp_path.glob("*.ckpt"))]
    assert len(saved) == _TRAINERS - 1
    for other in saved[1:]:
        for name, value in saved[0]["state_dict"].items():
            assert torch.equal(value, other["state_dict"][name])


# ---- after an error ------------------------------------------------------------------------------


def _again(make: Trainers, model: Model, then: str) -> dict[str, Tensor]:
    """Trains until the error, and once more; the weights."""
    trainer = make()
    with pytest.raises(ValueError, match=_WORDS):
        trainer.fit(model, _loader(), _loader())
    model.where = ""
    if then == "new":
        model = _model()
    if then != "same Trainer":
        trainer = make()
    trainer.fit(model, _loader(), _loader())
    strategy: Any = trainer.strategy
    if not make.stages:
        return dict(model.state_dict())
    return dict(strategy.lightning_module_state_dict())


def _again_on_ranks(
    rank: int, size: int, stages: int, model: tuple[str, int | None, int], then: str,
    options: dict[str, Any],
) -> dict[str, Tensor]:  # fmt: skip
    return _again(Trainers(stages, size, **options), _model(*model), then)


def _check_again(
    where: str, batch: int, then: str, size: int = 2, stages: int = 2, **options: Any
) -> None:
    model = (where, None, batch)
    expected = _again(Trainers(0, 1, **options), _model(*model), then)
    found, *_ = run_ranks(_again_on_ranks, size, stages, model, then, options, timeout=90)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("where", "batch"),
    [("before", 0), ("before", 2), ("after", 2), ("validation", 2), ("validation", 3), ("hook", 2)],
)
@pytest.mark.parametrize("then", ["same Trainer", "new Trainer", "new"])
def test_all_ranks_go_on_after_the_same_error(where: str, batch: int, then: str) -> None:
    _check_again(where, batch, then)


@pytest.mark.parametrize("then", ["same Trainer", "new"])
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 2)], ids=["dp2", "pp2-dp2"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_replicas_go_on_after_the_same_error(
    size: int, stages: int, accumulated: int, then: str
) -> None:
    _check_again("after", 3, then, size, stages, accumulate_grad_batches=accumulated)


def _until_refused(rank: int, size: int, stages: int, model: tuple[str, int | None, int]) -> None:
    make = Trainers(stages, size)
    with pytest.raises(ValueError, match=_WORDS):
        make().fit(_model(*model), _loader(), _loader())
    start_s = time.monotonic()
    try:
        make().fit(_model(), _loader())
    finally:
        assert time.monotonic() - start_s < _BOUND_S


@pytest.mark.parametrize(
    ("where", "rank", "batch"),
    [
        ("before", 0, 0), ("before", 1, 2), ("after", 0, 2), ("unit", 1, 2), ("validation", 1, 2),
        ("hook", 0, 2), ("hook", 1, 2),
    ],
)  # fmt: skip
def test_error_of_one_rank_is_named_by_the_next_run(where: str, rank: int, batch: int) -> None:
    failing = None if where == "unit" else rank
    report = run_ranks_expect_failure(_until_refused, 2, 2, (where, failing, batch), timeout=90)
    error = report.outcomes[rank].error or ""
    assert f"CommunicationError: rank {rank} ended its last run by ValueError: {_WORDS}" in error
    assert "gives no sign of life after the first failure" in error
    assert report.outcomes[1 - rank].exitcode


def test_who_ended_well_does_not_go_on_without_who_failed() -> None:
    report = run_ranks_expect_failure(_until_one_fails, 2, timeout=90)
    for outcome in report.outcomes:
        for told in (
            f"rank 0 ended its last run by ValueError: {_WORDS}",
            "rank 1 ended its last run well",
        ):
            assert told in (outcome.error or "")


def _until_one_fails(rank: int, size: int) -> None:
    make = Trainers(2, size)
    with pytest.raises(ValueError, match=_WORDS) if rank == 0 else nullcontext():
        make().fit(_model("end", 0), _loader())
    make().fit(_model(), _loader())
