"""`optimizer.step(closure)` in manual optimization: the step's code once more, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lightning.contract import Bench, Layout, ManualWithCritic, Model, Results, Twice, weights

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Closes(Model):
    """Forward, backward and a clip in a closure; looks at the gradients in a hook after it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            return loss

        loss = optimizer.step(closure=closure)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss, "twice": 2 * loss}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


class ClosesTwice(Closes):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=self.lr, ascent=0.3)


class ClosesInTurn(ManualWithCritic):
    """Two optimizers with closures that accumulate, as Lightning's own documentation shows."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        steps = batch_idx % 2 == 1

        def close_one() -> None:
            if not steps:
                one.zero_grad()
            self.manual_backward(self.loss(batch))

        def close_two() -> None:
            two.zero_grad()
            with torch.no_grad():
                logits = self(batch[0])
            self.manual_backward(self.critic(logits).pow(2).mean())

        with one.toggle_model(sync_grad=steps):
            one.step(closure=close_one)
        with two.toggle_model():
            two.step(close_two)

    def configure_optimizers(self) -> Any:
        return self.both_optimizers()


def _train(bench: Bench, model: Any) -> Any:
    smp = {"microbatches": 1} if bench.is_smp else None
    trainer = bench.trainer(max_epochs=2, precision="64-true", smp=smp)
    trainer.fit(model, bench.loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(trainer), getattr(model, "norms", []), trainer.global_step, metrics


def closes(bench: Bench) -> Any:
    return _train(bench, Closes())


def closes_twice(bench: Bench) -> Any:
    return _train(bench, ClosesTwice())


def closes_in_turn(bench: Bench) -> Any:
    return _train(bench, ClosesInTurn())


SCENARIOS = [closes, closes_twice, closes_in_turn]


@pytest.fixture(
    scope="module",
    params=[Layout(), Layout(pp=1, dp=2), Layout(pp=2, dp=2)],
    ids=["pp2", "dp2", "pp2-dp2"],
)
def results(request: Any) -> Results:
    return Results.collect(SCENARIOS, request.param)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario, rtol=1e-9, atol=1e-12)


def test_closures_are_run() -> None:
    """The comparisons above would not notice gradients that are never made."""
    before = Closes().state_dict()["head.weight"]
    found = [scenario(Bench())[0]["head.weight"] for scenario in SCENARIOS]
    for one, other in [(before, found[0]), (found[0], found[1])]:
        assert not torch.allclose(one.double(), other, rtol=1e-3)
