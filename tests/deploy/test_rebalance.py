"""Units that move between steps: nothing changes but the time that a step takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_smp import ConfigError, SMPStrategy
from tests.support.launch import run_ranks

_WIDTH, _STEPS, _AFTER = 6, 7, 3
_FAST, _SLOW = 0.0012, 0.012
"""Seconds of a unit, which no estimate knows."""


@dataclass(frozen=True)
class Case:
    """One training, with and without rebalancing."""

    optimizer: str = "sgd"
    tied: str = ""
    dp: int = 1
    smp: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "momentum, mirrored": Case(tied="mirrored"),
    "adam, accumulation": Case("adam", trainer={"accumulate_grad_batches": 2}),
    "adam, together": Case("adam", tied="together"),
    "virtual stages, split backward": Case(
        smp={"virtual_pipeline_degree": 2, "pipeline": "zero_bubble"}
    ),
}
WIDE_CASES = {
    "replicas": Case("adam", tied="mirrored", dp=2),
    "tensor parallel": Case(
        "adam",
        smp={
            "tensor_parallel_degree": 2, "prescaled_batch": True,
            "tensor_parallel_modules": {"layers.*.up": "column", "layers.*.down": "row"},
        },
    ),
}  # fmt: skip


class Layer(nn.Module):
    """A unit with parameters, buffers and plain attributes that all count."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_WIDTH, dtype=torch.float64)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, dtype=torch.float64)
        self.register_buffer("calls_seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.calls_seen += 1
        time.sleep(self.seconds / 3)
        y = self.down(torch.tanh(self.up(self.norm(x)))) * (1 + 0.01 * self.calls)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds * 2 / 3))
        return x + y


class Model(pl.LightningModule):
    def __init__(self, case: Case, seconds: list[float]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64)
        self.layers = nn.ModuleList(map(Layer, seconds))
        self.head = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64)
        if case.tied:
            self.head.weight = self.enter.weight
        self.case = case
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = self.enter(batch[0])
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_zero_grad(self, *_: Any) -> None:
        named = self.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})

    def configure_optimizers(self) -> Any:
        if self.case.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), 0.01)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def _loader(case: Case, rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    count = 8 * _STEPS * case.dp
    x = torch.randn(2, count, _WIDTH, generator=generator, dtype=torch.float64)
    data = TensorDataset(*x)
    if case.dp == 1:
        return DataLoader(data, batch_size=8)
    sampler = DistributedSampler(data, case.dp, rank // 2, shuffle=False)
    return DataLoader(data, batch_size=8, sampler=sampler)


def _fit(case: Case, rank: int, world: int, seconds: list[float], after: int) -> dict[str, Any]:
    model = Model(case, seconds)
    objects = list(model.parameters())
    given = {"tied_parameters": case.tied} if case.tied else {}
    strategy = SMPStrategy(
        pipeline_parallel_degree=2, microbatches=4, rebalance_after_steps=after,
        memory_weight=0.0, **{**given, **case.smp},
    )  # fmt: skip
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **case.trainer,
    )  # fmt: skip
    trainer.fit(model, _loader(case, rank))
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    weights = strategy.lightning_module_state_dict()
    return {
        "losses": model.losses,
        "gradients": model.gradients,
        "weights": {name: value.clone() for name, value in weights.items()},
        "homes": dict(strategy.deployment.partition.stage_of),
        "result": strategy.rebalanced,
    }


def _train(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Any]:
    slow_end = [_FAST] * 6 + [_SLOW] * 3
    found = {}
    for name, case in cases.items():
        never = _fit(case, rank, world, [0.0] * 9, 0)
        found[name] = (_fit(case, rank, world, slow_end, _AFTER), never)
    return found


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for cases, world in ((CASES, 2), (WIDE_CASES, 4)):
        ranks = run_ranks(_train, world, cases, timeout=200)
        found.update({name: [rank[name] for rank in ranks] for name in cases})
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*CASES, *WIDE_CASES])
def test_training_goes_on_as_if_nothing_had_moved(name: str, runs: dict[str, Any]) -> None:
    ranks = runs[name]
    for moved, never in ranks:
        assert moved["result"].moved
        assert never["result"] is None
        assert moved["homes"] != never["homes"]
        assert moved["losses"] == pytest.approx(never["losses"], rel=1e-12)
        for key, value in never["weights"].items():
            torch.testing.assert_close(moved["weights"][key], value, rtol=1e-11, atol=1e-13)
    assert ranks[0][0]["weights"]
    assert {rank[0]["result"].moved for rank in ranks} == {ranks[0][0]["result"].moved}


@pytest.mark.parametrize("name", ["momentum, mirrored", "adam, together"])
def test_gradients_move_with_their_parameters(name: str, runs: dict[str, Any]) -> None:
    (one, once), (other, never) = runs[name]
    for step in range(1, _STEPS):  # before each step, what the last one left
        expected = {**once["gradients"][step], **never["gradients"][step]}
        found = {**one["gradients"][step], **other["gradients"][step]}
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    holders = [set(rank["gradients"][_AFTER]) for rank in (one, other)]
    for stage, held in enumerate(holders):
        layers = {f"layers.{n}.up.weight" for n in range(9) if one["homes"][f"layers.{n}"] == stage}
        assert layers <= held
        assert {key for key in held if key.endswith("up.weight")} == layers


def test_a_lopsided_model_comes_out_balanced(runs: dict[str, Any]) -> None:
    result = runs["momentum, mirrored"][0][0]["result"]
    order = ["enter", *(f"layers.{n}" for n in range(9)), "head"]
    times = [result.unit_seconds[name] for name in order]
    best = min(max(sum(times[:cut]), sum(times[cut:])) for cut in range(len(times)))
    assert max(result.stages_before) > 1.25 * best  # by the estimate all layers are alike
    assert max(result.stages_after) <= 1.1 * best
    for name, seconds in result.unit_seconds.items():
        if name.startswith("layers"):
            planted = _SLOW if int(name.split(".")[1]) > 5 else _FAST
            assert planted <= seconds < 2 * planted + 0.005
    assert result.predicted_after_s < result.predicted_before_s
    assert result.measured_after_s < result.measured_before_s


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_degree": 1}, "single stage"),
        ({"rebalance_after_steps": 1}, "at least 2"),
        ({"auto_partition": False, "default_partition": 0}, "by hand"),
        ({"pipeline": "file", "config": {"schedule_file": "x"}}, "one split"),
    ],
)
def test_refused_by_name(options: dict[str, Any], reason: str) -> None:
    given = {"pipeline_parallel_degree": 2, "rebalance_after_steps": 5, **options}
    with pytest.raises(ConfigError, match=f"rebalance_after_steps.*{reason}"):
        SMPStrategy(**given)
