"""Batches: the ranks of one replica see the same ones, whatever makes them; all are exact."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.lightning.contract import (
    FEATURES,
    Bench,
    Layout,
    Model,
    Results,
    assert_close,
    loader,
    points,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Observer(pl.Callback):
    """Records batches after they were loaded, and the weights at the end."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch[0].clone())
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.weights = weights(trainer)


class Augmented(Dataset[Any]):
    """Adds noise from all three generators, as transforms in loader workers do."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        noise = torch.rand(FEATURES) + random.random() + float(np.random.rand())
        return x + noise, y


class Stream(IterableDataset[Any]):
    """Points in an order drawn anew, with noise."""

    def __iter__(self) -> Iterator[Any]:
        data = Augmented()
        for index in torch.randperm(16).tolist():
            yield data[index]


class ByRank(Dataset[Any]):
    """Different on every rank: what the check has to find."""

    def __init__(self, rank: int) -> None:
        self.points = points(16, seed=rank)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.points[index]


class Seeing(Model):
    """Keeps what its steps are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].clone())
        return self.loss(batch)


def _train(bench: Bench, train: Any, smp: Any = None, **options: Any) -> Observer:
    observer = Observer()
    bench.trainer(callbacks=[observer], smp=smp, **options).fit(Model(), train)
    return observer


def _outcome(observer: Observer) -> Any:
    return observer.batches, observer.losses, observer.weights


def uneven_batches(bench: Bench) -> Any:
    """Batches of 5, then 3, in two microbatches each."""
    return _outcome(_train(bench, loader(13, batch_size=5), {"drop_last": False}, max_epochs=2))


def smaller_than_microbatches(bench: Bench) -> Any:
    """The last batch has one sample."""
    return _outcome(_train(bench, loader(9), {"drop_last": False, "microbatches": 4}, max_epochs=2))


def short_batch_dropped(bench: Bench) -> Any:
    """The strategy's default does what the loader's option does on one device."""
    options = {} if bench.is_smp else {"drop_last": True}
    return _outcome(_train(bench, loader(14, **options), max_epochs=2))


def seeded_shuffle(bench: Bench) -> Any:
    pl.seed_everything(3, verbose=False)
    return _outcome(_train(bench, loader(shuffle=True), max_epochs=2))


def seeded_long_before(bench: Bench) -> Any:
    """What the program has drawn since (initial weights, say) counts, also in a second run."""
    pl.seed_everything(3, verbose=False)
    torch.nn.Linear(3, 3)
    first = _outcome(_train(bench, loader(shuffle=True)))
    return first, _outcome(_train(bench, loader(shuffle=True)))


def augmented_here(bench: Bench) -> Any:
    pl.seed_everything(3, verbose=False)
    return _outcome(_train(bench, DataLoader(Augmented(), 4, shuffle=True), max_epochs=2))


def augmented_in_seeded_workers(bench: Bench) -> Any:
    pl.seed_everything(3, workers=True, verbose=False)
    data = DataLoader(Augmented(), 4, shuffle=True, num_workers=2)
    return _outcome(_train(bench, data, max_epochs=2))


def augmented_in_workers(bench: Bench) -> Any:
    """No seed: what is drawn differs from run to run, but not from rank to rank."""
    _forget_seeds()
    data = DataLoader(Augmented(), 4, shuffle=True, num_workers=2)
    return _outcome(_train(bench, data))


def iterable(bench: Bench) -> Any:
    _forget_seeds()
    return _outcome(_train(bench, DataLoader(Stream(), 4)))


def iterable_in_workers(bench: Bench) -> Any:
    _forget_seeds()
    return _outcome(_train(bench, DataLoader(Stream(), 4, num_workers=1)))


def different_batches(bench: Bench) -> str:
    try:
        _train(bench, DataLoader(ByRank(bench.rank), 4))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def led(bench: Bench) -> Any:
    """One rank's batches are everybody's, in training and evaluation."""
    observer = Observer()
    trainer = bench.trainer(callbacks=[observer], smp={"batch_source": "leader"}, max_epochs=2)
    model = Seeing()
    trainer.fit(model, DataLoader(ByRank(bench.rank), 4))
    predictions = trainer.predict(model, DataLoader(ByRank(bench.rank).points.tensors[0], 4))
    return torch.cat(model.seen), observer.losses, observer.weights, predictions


def _forget_seeds() -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    torch.seed()
    random.seed()
    np.random.seed()


LIKE_ONE_DEVICE = [
    uneven_batches,
    smaller_than_microbatches,
    short_batch_dropped,
    seeded_shuffle,
    seeded_long_before,
    augmented_here,
    augmented_in_seeded_workers,
]
LIKE_EACH_OTHER = [augmented_in_workers, iterable, iterable_in_workers]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect([*LIKE_ONE_DEVICE, *LIKE_EACH_OTHER, led], Layout())


@pytest.mark.parametrize("scenario", LIKE_ONE_DEVICE, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scenario", LIKE_EACH_OTHER, ids=lambda scenario: scenario.__name__)
def test_all_ranks_see_the_same(results: Results, scenario: Any) -> None:
    first, second = results.ranks(scenario)
    assert len(first[0]) == 4
    assert_close(second, first, rtol=0.0, atol=0.0)


def test_leader_gives_its_batches(results: Results) -> None:
    results.assert_like_one_device(led, rtol=2e-5, atol=1e-6)


def test_different_batches_are_refused_by_name() -> None:
    for message in Results.collect([different_batches], Layout()).ranks(different_batches):
        assert message.startswith("CommunicationError")
        assert "rank 0" in message
        assert "rank 1" in message
        assert 'batch_source="leader"' in message
