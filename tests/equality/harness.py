"""Trains a case on one device and with the smp strategy, and compares the two.

``train_reference`` runs in this process. ``train_smp`` runs in a rank of
``tests.support.launch.run_ranks``; ``run_layout`` starts the ranks for many cases at once, because
starting them costs more than training a case. Results are numbers and tensors only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.equality.case import SEED, Case
from tests.equality.split import SplitStrategy
from tests.equality.zoo import CASES
from tests.support.devices import ACCELERATOR
from tests.support.launch import RankFailure, run_ranks

__all__ = [
    "Layout",
    "Outcome",
    "Result",
    "averaged",
    "compare",
    "fits",
    "reference_kind",
    "run_layout",
    "train_in_pieces",
    "train_reference",
    "train_smp",
    "train_smp_cases",
]

_CASES_PER_START = 20
Outcome = list["Result"] | str  # one result per rank, or why there is none


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees and schedule of one run."""

    pp: int = 1
    dp: int = 1
    microbatches: int = 1
    pipeline: Literal["simple", "interleaved", "zero_bubble", "auto", "file"] = "interleaved"
    virtual: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp

    def __str__(self) -> str:
        chunks = f"-v{self.virtual}" if self.virtual > 1 else ""
        return f"pp{self.pp}-dp{self.dp}-mb{self.microbatches}-{self.pipeline}{chunks}"


@dataclass
class Result:
    """What one rank has to show after training.

    ``weights`` is the whole state dict where the strategy gives it (rank 0 at least), ``gradients``
    holds what lay in ``.grad`` on this rank before the first optimizer step and before clipping.
    """

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def fits(case: Case, layout: Layout) -> bool:
    """Return whether a case says that it can be run in this layout."""
    return (
        case.min_pp <= layout.pp <= case.max_pp
        and layout.dp <= case.max_dp
        and layout.microbatches in case.microbatches
    )


def reference_kind(case: Case, layout: Layout) -> Literal["plain", "split", "smp"]:
    """Return which run a layout must equal.

    ``plain``: Lightning on the global batch. ``split``: the same in the same pieces. ``smp``: the
    strategy itself without stages, where random numbers depend on its own seeding.
    """
    if case.noise == "inside" or (case.noise == "outer" and layout.dp > 1):
        return "smp"
    if case.noise == "none" and not case.needs_same_split:
        return "plain"
    return "plain" if layout.dp * layout.microbatches == 1 else "split"


def train_reference(case: Case, layout: Layout | None = None) -> Result:
    """Train a case in this process without smp: what a run in the layout must equal."""
    batch_size = case.batch_size * (layout.dp if layout else 1)
    if layout is None or reference_kind(case, layout) == "plain":
        return _train(case, strategy="auto", devices=1, batch_size=batch_size)
    if reference_kind(case, layout) == "smp":
        raise ValueError(f"{case.name} draws its own noise: compare with smp at pp=1")
    return train_in_pieces(case, layout)


def train_in_pieces(case: Case, layout: Layout) -> Result:
    """Train a case in this process without smp, its batches cut as the layout cuts them."""
    strategy = SplitStrategy(num_microbatches=layout.microbatches, num_replicas=layout.dp)
    return _train(case, strategy=strategy, devices=1, batch_size=case.batch_size * layout.dp)


def train_smp(case: Case, layout: Layout) -> Result:
    """Train a case with the smp strategy; every rank of the layout calls this."""
    from lightning_smp import SMPStrategy

    strategy = SMPStrategy(
        pipeline_parallel_degree=layout.pp,
        microbatches=layout.microbatches,
        pipeline=layout.pipeline,
        **{"config": {"virtual_pipeline_degree": layout.virtual}, **case.strategy},
    )
    return _train(case, strategy=strategy, devices=layout.world_size, batch_size=case.batch_size)


def train_smp_cases(
    rank: int, world_size: int, names: Sequence[str], layout: Layout, folder: Path
) -> None:
    """Train cases one after the other in a rank, and store each result as soon as it is there."""
    assert world_size == layout.world_size
    for name in names:
        result = train_smp(CASES[name], layout)
        partial = folder / f"{rank}.partial"
        torch.save(asdict(result), partial)
        partial.rename(_result_path(folder, name, rank))


def run_layout(names: Sequence[str], layout: Layout, folder: Path) -> dict[str, Outcome]:
    """Train cases with smp in new processes and return each one's outcome.

    A case that fails or hangs costs the others only a new start of the ranks. They train a few
    cases per start, so that a hang is noticed soon.
    """
    outcomes: dict[str, Outcome] = {}
    for first in range(0, len(names), _CASES_PER_START):
        outcomes.update(_run_few(names[first : first + _CASES_PER_START], layout, folder))
    return outcomes


def _run_few(names: Sequence[str], layout: Layout, folder: Path) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    waiting = list(names)
    while waiting:
        error = "the ranks ended well but stored no result"
        limit_s = 60.0 + 2.0 * layout.world_size * len(waiting)
        try:
            run_ranks(train_smp_cases, layout.world_size, waiting, layout, folder, timeout=limit_s)
        except RankFailure as failure:
            error = str(failure)
        while waiting:
            name = waiting.pop(0)
            outcomes[name] = _stored_results(folder, name, layout) or error
            if isinstance(outcomes[name], str):
                break
    return outcomes


def compare(case: Case, reference: Result, results: Sequence[Result]) -> None:
    """Fail with every difference between a reference and the ranks of a run.

    Raises:
        AssertionError: naming each value that differs, by how much, and on which rank.
    """
    problems = _difference("weights", reference.weights, results[0].weights, case.rtol)
    for rank, result in enumerate(results):
        gradients = {name: reference.gradients.get(name) for name in result.gradients}
        problems += _difference(f"gradient, rank {rank},", gradients, result.gradients, case.rtol)
        problems += _metric_differences(rank, reference.metrics, result.metrics, case.rtol)
    lost = reference.gradients.keys() - {name for r in results for name in r.gradients}
    problems += [f"gradient {name}: on no rank" for name in sorted(lost)]
    if case.compares_losses:
        losses = _mean_losses(results)
        problems += _metric_differences(-1, _numbered(reference.losses), losses, case.rtol)
    if problems:
        raise AssertionError(f"{case.name} differs from one device:\n  " + "\n  ".join(problems))


def averaged(results: Sequence[Result]) -> Result:
    """Return one result for all ranks, to serve as a reference: losses are means over ranks."""
    return replace(results[0], losses=list(_mean_losses(results).values()))


class _Recorder(pl.Callback):
    """Collects a run's result while every rank is still able to take part in gathering it."""

    def __init__(self) -> None:
        self.result = Result()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step == 0:
            self.result.gradients = {
                name: parameter.grad.detach().clone().cpu()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else None
        self.result.losses.append(math.nan if loss is None else float(loss))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.result.weights = {name: value.detach().clone().cpu() for name, value in state.items()}


class _Ordered(pl.LightningDataModule):
    """Gives every replica its samples in order: Lightning's own sampler would shuffle them."""

    def __init__(self, case: Case, batch_size: int) -> None:
        super().__init__()
        self.case = case
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def _loader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        data = self.case.make_data()
        replica = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(data, shuffle=False, **replica) if replica else None
        return DataLoader(
            data, batch_size=self.batch_size, sampler=sampler, collate_fn=self.case.collate
        )


class _OrderedTwice(_Ordered):
    """The same with validation, on the same samples."""

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()


def _train(case: Case, *, strategy: str | Strategy, devices: int, batch_size: int) -> Result:
    recorder = _Recorder()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        pl.seed_everything(SEED, verbose=False)
        trainer = pl.Trainer(
            accelerator=ACCELERATOR,
            devices=devices,
            strategy=strategy,
            max_epochs=1,
            limit_train_batches=case.steps,
            limit_val_batches=case.steps if case.validates else 0,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[recorder],
            **case.trainer,
        )
        data = _OrderedTwice if case.validates else _Ordered
        trainer.fit(case.make_module(), datamodule=data(case, batch_size))
    recorder.result.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return recorder.result


def _result_path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.pt"


def _stored_results(folder: Path, name: str, layout: Layout) -> list[Result] | None:
    paths = [_result_path(folder, name, rank) for rank in range(layout.world_size)]
    if not all(path.exists() for path in paths):
        return None
    return [Result(**torch.load(path, weights_only=True)) for path in paths]


def _difference(
    what: str, expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor], rtol: float
) -> list[str]:
    problems = [f"{what} {name}: missing" for name in sorted(expected.keys() - actual.keys())]
    problems += [f"{what} {name}: unexpected" for name in sorted(actual.keys() - expected.keys())]
    for name in sorted(expected.keys() & actual.keys()):
        wanted, got = expected[name], actual[name]
        if wanted is None:
            problems.append(f"{what} {name}: one device has none")
        elif wanted.shape != got.shape or wanted.dtype != got.dtype:
            problems.append(f"{what} {name}: {got.dtype}{list(got.shape)} for {list(wanted.shape)}")
        elif (error := _relative_error(wanted, got)) > rtol:
            problems.append(f"{what} {name}: relative error {error:.1e} > {rtol:.0e}")
    return problems


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """Return the largest error relative to the largest entry, never relative to less than 1e-3.

    The floor keeps gradients that are mathematically zero from being compared by their rounding.
    """
    if expected.numel() == 0:
        return 0.0
    expected, actual = expected.double().cpu(), actual.double().cpu()
    error = (expected - actual).abs().max() / expected.abs().max().clamp(min=1e-3)
    return math.inf if error.isnan() else float(error)


def _metric_differences(
    rank: int, expected: Mapping[str, float], actual: Mapping[str, float], rtol: float
) -> list[str]:
    what = "loss of step" if rank < 0 else f"metric, rank {rank},"
    # Lightning keeps metrics in float32 whatever the module's precision.
    rtol = max(rtol, 1e-6)
    return _difference(
        what,
        {name: torch.tensor(value, dtype=torch.float64) for name, value in expected.items()},
        {name: torch.tensor(value, dtype=torch.float64) for name, value in actual.items()},
        rtol,
    )


def _numbered(losses: Sequence[float]) -> dict[str, float]:
    return {str(step): loss for step, loss in enumerate(losses)}


def _mean_losses(results: Sequence[Result]) -> dict[str, float]:
    """Return every step's mean over the ranks: that of the global batch, whoever reports what."""
    columns = zip(*(result.losses for result in results), strict=True)
    return _numbered([sum(column) / len(column) for column in columns])
