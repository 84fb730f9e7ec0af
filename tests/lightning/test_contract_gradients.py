"""Gradients between a step and the update: what hooks see of them, and that there is one set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.lightning.contract import (
    Bench,
    GradientWatcher,
    Layout,
    Model,
    Results,
    Twice,
    assert_close,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test

_TIGHT = {"rtol": 1e-10, "atol": 1e-13}
Seen = dict[str, Tensor]


class Watched(GradientWatcher):
    """Records gradients where the strategy cannot know better: after backward, before the step."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x.to(self.head.weight.dtype), y))

    def on_after_backward(self) -> None:
        self.look()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()


class LooksBeforeZeroing(Watched):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()


class NeverZeroes(Watched):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


class ZeroesAtTimes(Watched):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad(set_to_none=False)


class DoublesInBackward(Watched):
    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()


class ZeroesHalf(torch.optim.SGD):
    """Keeps half of each gradient for the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HasOwnOptimizer(Watched):
    def configure_optimizers(self) -> Any:
        return ZeroesHalf(self.parameters(), lr=self.lr)


class StepsTwice(Watched):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=self.lr, ascent=0.01)


class TrainsHead(Watched):
    """Nobody zeroes the gradients of the rest."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=self.lr)


class Weighted(Watched):
    """Tells what its loss is a mean over, which is known at the end of the step only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "loss_weight": len(batch[0])}


class Reads(pl.Callback):
    """A callback in the hook of the given name."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module, *_: module.look())


class Triples(pl.Callback):
    """Changes the loss on its way to backward."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * 3)


class Refactors(pl.Callback):
    """Changes the number of accumulated batches in the middle of an epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        trainer.accumulate_grad_batches = 3 if index < 3 else 2


class Overflows(Watched):
    """Some gradients of batch 2 are infinite, in the first layer only."""

    def on_after_backward(self) -> None:
        bias = self.first[0].bias
        if self.trainer.fit_loop.epoch_loop.batch_idx == 2 and bias.grad is not None:
            bias.grad[0] = torch.inf
        super().on_after_backward()


def _train(bench: Bench, model: Watched, *callbacks: pl.Callback, **options: Any) -> Any:
    """Epochs of five batches in float64: what was seen, the weights, the scaler's scale."""
    options = {"precision": "64-true", "max_epochs": 2, "gradient_clip_val": 1.0, **options}
    trainer = bench.trainer(callbacks=list(callbacks), **options)
    trainer.fit(model, bench.loader(20, 4))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return model.seen, weights(trainer), scaler.get_scale() if scaler is not None else 1.0


def _scaled(bench: Bench, model: Watched, **options: Any) -> Any:
    """With a gradient scaler; autocast leaves float64 alone, so that nothing is rounded to half."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = bench.trainer(plugins=plugin, max_epochs=2, **options)
    trainer.fit(model.double(), bench.loader(20, 4))
    return model.seen, weights(trainer), trainer.precision_plugin.scaler.get_scale()


_CASES: dict[str, Callable[[Bench], Any]] = {
    "each_batch": lambda bench: _train(bench, Watched()),
    "three_batches": lambda bench: _train(bench, Watched(), accumulate_grad_batches=3),
    "scheduled": lambda bench: _train(
        bench, Watched(), GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}), max_epochs=3
    ),
    "refactored": lambda bench: _train(bench, Watched(), Refactors()),
    "looks_before_zeroing": lambda bench: _train(bench, LooksBeforeZeroing()),
    "callback_looks_before_zeroing": lambda bench: _train(
        bench, Watched(), Reads("on_before_zero_grad"), accumulate_grad_batches=2
    ),
    "callback_looks_before_backward": lambda bench: _train(
        bench, Watched(), Reads("on_before_backward"), accumulate_grad_batches=3
    ),
    "never_zeroes": lambda bench: _train(bench, NeverZeroes()),
    "never_zeroes_accumulated": lambda bench: _train(
        bench, NeverZeroes(), accumulate_grad_batches=2
    ),
    "zeroes_at_times": lambda bench: _train(bench, ZeroesAtTimes()),
    "doubles_in_backward": lambda bench: _train(
        bench, DoublesInBackward(), accumulate_grad_batches=3
    ),
    "triples": lambda bench: _train(bench, Watched(), Triples(), accumulate_grad_batches=3),
    "own_optimizer": lambda bench: _train(bench, HasOwnOptimizer()),
    "steps_twice": lambda bench: _train(bench, StepsTwice()),
    "trains_head": lambda bench: _train(bench, TrainsHead(), accumulate_grad_batches=2),
    "weighted": lambda bench: _train(bench, Weighted(), accumulate_grad_batches=3),
    "scaled": lambda bench: _scaled(bench, Overflows()),
    "scaled_accumulated": lambda bench: _scaled(bench, Overflows(), accumulate_grad_batches=3),
    "scaled_triples": lambda bench: _scaled(
        bench, Watched(), callbacks=[Triples()], accumulate_grad_batches=3
    ),
}  # fmt: skip


def training(bench: Bench) -> dict[str, Any]:
    """All cases, which differ in what of a step's surroundings can be foreseen."""
    return {name: case(bench) for name, case in _CASES.items()}


class Counts(pl.Callback):
    """Counts gradients of the batch before that still exist: in the step, and in its backward."""

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.alive: list[tuple[int, int]] = []

    def count(self) -> int:
        """How many of the last gradients have memory."""
        return sum(not ref.expired() for ref in self.refs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        found = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.refs = [StorageWeakRef(gradient.untyped_storage()) for gradient in found]


class Counted(Model):
    """Takes the counts."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self.first[0].bias.register_post_accumulate_grad_hook(self._in_backward)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.in_step = self.counts.count()
        return super().training_step(batch, batch_idx)

    def _in_backward(self, bias: Tensor) -> None:
        if self.counts.refs:
            self.counts.alive.append((self.in_step, self.counts.count()))


class CountedLooksBeforeZeroing(Counted):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class InPlace(Watched):
    """Records whether its first gradient's memory stays the same from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []
        self.first[0].weight.register_post_accumulate_grad_hook(
            lambda p: self.places.append(p.grad.data_ptr())
        )


def memory(bench: Bench) -> dict[str, Any]:
    """Gradients alive where nobody looks before zeroing, and where somebody does."""
    found: dict[str, Any] = {}
    for name, kind in (("free", Counted), ("looked at", CountedLooksBeforeZeroing)):
        counts = Counts()
        bench.trainer(callbacks=[counts]).fit(kind(counts), bench.loader(12))
        found[name] = counts.alive
    for name, callbacks in (("places", []), ("other places", [Reads("on_before_backward")])):
        model = InPlace()
        trainer = bench.trainer(accumulate_grad_batches=3, callbacks=callbacks)
        trainer.fit(model, bench.loader(12))
        found[name] = model.places
    return found


_LAYOUTS = {
    "one process": Layout(pp=1, microbatches=1),
    "two stages": Layout(pp=2, microbatches=2),
}


@pytest.fixture(scope="module", params=_LAYOUTS)
def results(request: pytest.FixtureRequest) -> Results:
    return Results.collect([training, memory], _LAYOUTS[request.param])


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Any]:
    return training(Bench())


@pytest.mark.parametrize("name", _CASES)
def test_hooks_and_weights_are_those_of_one_device(
    results: Results, expected: Mapping[str, Any], name: str
) -> None:
    """Each rank sees the gradients of its stage; together they see all, in every hook."""
    seen, after, scale = expected[name]
    ranks = [found[name] for found in results.ranks(training)]
    assert len(seen) > 8
    for found, found_after, found_scale in ranks:
        assert len(found) == len(seen)
        assert_close(found_after, after, name, **_TIGHT)
        assert found_scale == scale
    for index, gradients in enumerate(seen):
        together = {key: value for found in ranks for key, value in found[0][index].items()}
        in_order = dict(sorted(gradients.items()))
        assert_close(dict(sorted(together.items())), in_order, f"{name}, {index}", **_TIGHT)


@pytest.fixture(scope="module")
def replicas() -> Results:
    return Results.collect([training], Layout(pp=1, dp=2, microbatches=1))


@pytest.mark.parametrize("name", _CASES)
def test_replicas_have_the_weights_of_one_device(
    replicas: Results, expected: Mapping[str, Any], name: str
) -> None:
    """Also where gradients that were summed over the replicas stay for the next update."""
    _, after, scale = expected[name]
    for found in replicas.ranks(training):
        assert_close(found[name][1], after, name, **_TIGHT)
        assert found[name][2] == scale


def test_cases_differ(expected: Mapping[str, Any]) -> None:
    """The comparison would not notice a hook that does nothing."""
    plain = expected["each_batch"][1]["head.weight"]
    same = [name for name, (_, after, _) in expected.items() if torch.equal(
        after["head.weight"], plain)]  # fmt: skip
    assert same == ["each_batch", "looks_before_zeroing"], same
    assert expected["scaled"][2] != 2.0**12


def test_one_set_of_gradients(results: Results) -> None:
    """None of the step before is left when a step begins, and accumulation is in place."""
    first = results.ranks(memory)[0]
    assert len(first["free"]) >= 2
    assert all(alive == (0, 0) for alive in first["free"])
    assert all(in_step > 0 for in_step, _ in first["looked at"])
    assert len(set(first["places"])) == 1
    assert len(set(first["other places"])) > 1
