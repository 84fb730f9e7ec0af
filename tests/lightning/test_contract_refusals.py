"""What cannot work with a split model is refused by name, on every rank, with the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)

from tests.lightning.contract import Bench, Layout, Model, Results, loader

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class UsesLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class UsesMuon(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


class UsesAdafactor(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class UsesMuonOnWholeWeights(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([self.head.weight])


class TrainsAListed(Model):
    """A part that only a Python list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.nn.Linear(6, 6)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.hidden[0](x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden[0].parameters()], lr=0.1)


class CopiesItself(Model):
    def on_train_end(self) -> None:
        copy.deepcopy(self)


def _message(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fit(bench: Bench, model: Any, **options: Any) -> str:
    return _message(lambda: bench.trainer(**options).fit(model, loader()))


def stochastic_averaging(bench: Bench) -> str:
    return _fit(bench, Model(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)], max_epochs=4)


def averaging(bench: Bench) -> str:
    return _fit(bench, Model(), callbacks=[WeightAveraging()])


def exponential_averaging(bench: Bench) -> str:
    return _fit(bench, Model(), callbacks=[EMAWeightAveraging()])


def lbfgs(bench: Bench) -> str:
    return _fit(bench, UsesLBFGS())


def unregistered(bench: Bench) -> str:
    return _fit(bench, TrainsAListed())


def muon(bench: Bench) -> str:
    return _fit(bench, UsesMuon())


def adafactor(bench: Bench) -> str:
    return _fit(bench, UsesAdafactor())


def muon_on_whole_weights(bench: Bench) -> str:
    return _fit(bench, UsesMuonOnWholeWeights())


def compiled_module(bench: Bench) -> str:
    model = torch.compile(Model(), backend="eager")
    return _fit(bench, model)


def copied_after_partition(bench: Bench) -> str:
    return _fit(bench, CopiesItself())


def forward_outside_a_step(bench: Bench) -> str:
    model = Model()
    bench.trainer().fit(model, loader())
    return _message(lambda: model(torch.zeros(2, 6)))


def state_dict_of_a_split_module(bench: Bench) -> str:
    model = Model()
    trainer = bench.trainer()
    trainer.fit(model, loader())
    assert bool(trainer.strategy.lightning_module_state_dict()) == trainer.is_global_zero
    return _message(model.state_dict)


def timed_validation(bench: Bench) -> str:
    return _fit(bench, Model(), val_check_interval="00:00:00:01", check_val_every_n_epoch=None)


def indivisible_batch(bench: Bench) -> str:
    def run() -> None:
        bench.trainer(smp={"drop_last": True}).fit(Model(), loader(12, batch_size=3))

    return _message(run)


def dropping_everything(bench: Bench) -> str:
    def run() -> None:
        bench.trainer(smp={"drop_last": True}).fit(Model(), loader(3))

    return _message(run)


def other_degree_on_a_split_module(bench: Bench) -> str:
    model = Model()
    bench.trainer().fit(model, loader())
    other = bench.trainer(smp={"pipeline_parallel_degree": 1})
    return _message(lambda: other.fit(model, loader()))


def wrong_loss(bench: Bench) -> str:
    class ReturnsNoLoss(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"score": self.loss(batch)}

    return _fit(bench, ReturnsNoLoss())


EXPECTED: dict[Any, tuple[str, ...]] = {
    stochastic_averaging: ("UnsupportedError", "StochasticWeightAveraging", "Remove it"),
    averaging: ("UnsupportedError", "WeightAveraging", "Remove it"),
    exponential_averaging: ("UnsupportedError", "EMAWeightAveraging", "Remove it"),
    lbfgs: ("UnsupportedError", "LBFGS", "Use another optimizer"),
    unregistered: ("UnsupportedError", "SGD", "(6, 6)", "nn.ModuleList"),
    compiled_module: ("compile",),
    copied_after_partition: ("UnsupportedError", "copy.deepcopy", "Copy the model before"),
    forward_outside_a_step: ("UnsupportedError", "step"),
    state_dict_of_a_split_module: ("UnsupportedError", "lightning_module_state_dict()"),
    timed_validation: ("UnsupportedError", "val_check_interval", "a number of batches"),
    indivisible_batch: ("ConfigError", "A batch of 3 samples", "2 and 4"),
    dropping_everything: ("ConfigError", "drop_last", "3 training samples"),
    other_degree_on_a_split_module: ("UnsupportedError", "2 stages", "degree=1"),
    wrong_loss: ("MisconfigurationException", "'loss' key needs to be present"),
}


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect(list(EXPECTED), Layout())


@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda scenario: scenario.__name__)
def test_is_refused_by_name(results: Results, scenario: Any) -> None:
    for rank, message in enumerate(results.ranks(scenario)):
        missing = [part for part in EXPECTED[scenario] if part not in message]
        assert not missing, f"rank {rank}: {message}"


SPLIT = {
    **{scenario: EXPECTED[scenario] for scenario in (averaging, stochastic_averaging)},
    lbfgs: ("UnsupportedError", "LBFGS", "tensor_parallel_degree=1"),
    muon: ("UnsupportedError", "Muon", "first.0.weight", "AdamW"),
    adafactor: ("UnsupportedError", "Adafactor", "first.0.weight", "tensor_parallel_degree=2"),
    muon_on_whole_weights: ("no error",),
}


@pytest.fixture(scope="module")
def split() -> Results:
    options = {
        "tensor_parallel_degree": 2,
        "tensor_parallel_modules": {"first.0": "column", "second.0": "row"},
    }
    return Results.collect(list(SPLIT), Layout(pp=1, dp=2, microbatches=1, options=options))


@pytest.mark.parametrize("scenario", SPLIT, ids=lambda scenario: scenario.__name__)
def test_is_refused_with_split_weights(split: Results, scenario: Any) -> None:
    for message in split.ranks(scenario):
        for part in SPLIT[scenario]:
            assert part in message, message
