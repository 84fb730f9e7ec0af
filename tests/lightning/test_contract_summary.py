"""What users ask a module about itself: ModelSummary, counts, names, types, before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from tests.lightning.contract import FEATURES, Bench, Layout, Model, Results, loader

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class WithExample(Model):
    """Has an example input, which ModelSummary runs the model on."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, FEATURES)
        self.extra = nn.Parameter(torch.ones(1))
        for parameter in self.second.parameters():
            parameter.requires_grad_(False)
        if tied:
            self.again = self.first

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.extra


def _described(model: Model) -> Any:
    summary = summarize(model, max_depth=-1)
    return {
        "total": summary.total_parameters,
        "trainable": summary.trainable_parameters,
        "names": summary.layer_names,
        "types": summary.layer_types,
        "numbers": summary.param_nums,
        "megabytes": summary.model_size,
        "inputs": summary.in_sizes,
    }


def _counted(model: Model) -> Any:
    return {
        "names": [name for name, _ in model.named_parameters()],
        "shapes": [list(p.shape) for p in model.parameters()],
        "types": [str(p.dtype) for p in model.parameters()],
        "trainable": [p.requires_grad for p in model.parameters()],
        "elements": sum(p.numel() for p in model.parameters()),
        "devices": sorted({str(p.device) for p in model.parameters()}),
    }


class Describes(WithExample):
    """Describes itself where users do: in hooks."""

    seen: list[Any]

    def on_fit_start(self) -> None:
        self.seen = [_counted(self)]

    def on_train_end(self) -> None:
        self.example_input_array = None  # a forward outside a step is another matter
        self.seen += [_counted(self), _described(self)]


def in_hooks(bench: Bench) -> Any:
    model = Describes()
    trainer = bench.trainer(enable_model_summary=True, callbacks=[ModelSummary(max_depth=-1)])
    trainer.fit(model, loader())
    return model.seen


def before_and_after(bench: Bench) -> Any:
    model = WithExample()
    before = _described(model)
    bench.trainer().fit(model, loader())
    model.example_input_array = None
    return before, _described(model), _counted(model)


def with_sharing(bench: Bench) -> Any:
    model = WithExample(tied=True)
    bench.trainer().fit(model, loader())
    model.example_input_array = None
    return _described(model), _counted(model)


SCENARIOS = [in_hooks, before_and_after, with_sharing]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.collect(SCENARIOS, Layout())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_one_device(results: Results, scenario: Any) -> None:
    results.assert_like_one_device(scenario)
