"""Deferred and hand-placed models train on several ranks as eager ones do on one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp.deferred import is_deferred
from lightning_smp.errors import PartitionError
from lightning_smp.placed.random import seed_everywhere
from tests.lightning.contract import FEATURES, Bench, Layout, Model, Results, loader, weights
from tests.placed.rig import Rig, samples
from tests.placed.steps import HALVES, Chain, chain_loss
from tests.support.launch import gloo_group, run_ranks

pytestmark = pytest.mark.timeout(300)  # the ranks of all scenarios start in one test


class Net(Model):
    """Layers with draws, buffers, views and a tied pair; made anywhere."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.first = self.second = self.head = nn.Identity()
        self.make()

    def make(self) -> None:
        """Builds the layers, always with the same numbers."""
        torch.manual_seed(9)
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.second[2].weight = self.second[0].weight
        self.head = nn.Linear(8, 3)
        nn.init.orthogonal_(self.second[0].weight)
        self.head.weight.data[0].mul_(0.5)


class Late(Net):
    """Builds its layers in `configure_model`."""

    def make(self) -> None:
        """Leaves it to `configure_model`."""

    def configure_model(self) -> None:
        """Builds the layers."""
        if isinstance(self.head, nn.Identity):
            Net.make(self)
            self.was_deferred = is_deferred(self.head.weight)


class Placed(Model):
    """Says in code where its layers go; two of them share a weight."""

    def __init__(self) -> None:
        super().__init__(0.05)
        torch.manual_seed(9)
        with smp.partition(1):
            self.first = nn.Linear(FEATURES, 8)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with smp.partition(1):
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.head[0].weight = self.second[1].weight
        smp.set_partition(self.head[1], 0)


def _delayed(bench: Bench) -> AbstractContextManager[None]:
    return smp.delay_param_initialization() if bench.is_smp else nullcontext()


def _train(bench: Bench, model: Any, **options: Any) -> dict[str, Tensor]:
    trainer = bench.trainer(**options)
    trainer.fit(model, bench.loader())
    return weights(trainer)


def deferred_by_the_user(bench: Bench) -> dict[str, Tensor]:
    with _delayed(bench):
        model = Net()
    assert is_deferred(model.second[0].weight) == bench.is_smp
    found = _train(bench, model)
    assert not any(is_deferred(p) for p in model.parameters())
    return found


def deferred_in_configure_model(bench: Bench) -> dict[str, Tensor]:
    model = Late()
    config = {"config": {"delayed_parameter_initialization": True}}
    found = _train(bench, model, smp=config if bench.is_smp else None)
    assert model.was_deferred == bench.is_smp
    return found


def deferred_by_init_module(bench: Bench) -> dict[str, Tensor]:
    trainer = bench.trainer()
    with trainer.init_module(empty_init=bench.is_smp):
        model = Net()
    assert is_deferred(model.head.weight) == bench.is_smp
    trainer.fit(model, bench.loader())
    return weights(trainer)


def loaded_before_the_split(bench: Bench) -> dict[str, Tensor]:
    with _delayed(bench):
        model = Net()
    state = {key: value + 0.25 for key, value in Net().state_dict().items()}
    model.load_state_dict(state)
    return _train(bench, model)


def validated_first(bench: Bench) -> Any:
    with _delayed(bench):
        model = Net()
    model.validation_step = lambda batch, batch_idx: model.log("loss", model.loss(batch))
    trainer = bench.trainer()
    found = trainer.validate(model, bench.loader(), verbose=False)
    return [dict(found[0]), weights(trainer)]


def placed_by_hand(bench: Bench) -> dict[str, Tensor]:
    model = Placed()
    trainer = bench.trainer(smp={"auto_partition": False, "default_partition": 0})
    trainer.fit(model, bench.loader())
    if bench.is_smp:
        partition = trainer.strategy.deployment.partition
        assert dict(partition.stage_of) == {
            "first": 1, "second.0": 0, "second.1": 0, "head.0": 1, "head.1": 0
        }  # fmt: skip
        assert partition.mode == "mirrored"
        with pytest.raises(PartitionError, match="split already"):
            smp.set_partition(model.head, 0)
    return weights(trainer)


def placed_by_hand_without_memory(bench: Bench) -> dict[str, Tensor]:
    with _delayed(bench):
        model = Placed()
    return _train(bench, model, smp={"auto_partition": False, "default_partition": 0})


def hand_placed_is_ignored_with_auto_partition(bench: Bench) -> dict[str, Tensor]:
    trainer = bench.trainer(smp={"config": {"partition_policy": "tree"}})
    trainer.fit(Placed(), bench.loader())
    if bench.is_smp:
        assert trainer.strategy.deployment.partition.stage_of["first"] == 0
    return weights(trainer)


def apart_although_together(bench: Bench) -> str:
    options = {"auto_partition": False, "default_partition": 0, "tied_parameters": "together"}
    trainer = bench.trainer(smp=options)
    if bench.is_smp:
        with pytest.raises(PartitionError, match=r"second.1.weight, head.0.weight are on stages"):
            trainer.fit(Placed(), loader())
    return "refused"


def out_of_range(bench: Bench) -> str:
    model = Placed()
    smp.set_partition(model.first, 0)
    vars(model.first)["_smp_stage"] = 2  # as from a context before the number of stages was known
    trainer = bench.trainer(smp={"auto_partition": False, "default_partition": 0})
    if bench.is_smp:
        with pytest.raises(PartitionError, match=r"'first' is 2. With 2 stages"):
            trainer.fit(model, loader())
        with pytest.raises(PartitionError, match=r"smp.partition is 2. With 2 stages"):
            smp.partition(2)
    return "refused"


SCENARIOS = [
    deferred_by_the_user,
    deferred_in_configure_model,
    deferred_by_init_module,
    loaded_before_the_split,
    validated_first,
    placed_by_hand,
    placed_by_hand_without_memory,
    hand_placed_is_ignored_with_auto_partition,
    apart_although_together,
    out_of_range,
]


@pytest.fixture(scope="module")
def two_stages() -> Results:
    return Results.collect(SCENARIOS, Layout(pp=2, microbatches=1))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_stages_are_like_one_device(two_stages: Results, scenario: Any) -> None:
    two_stages.assert_like_one_device(scenario)


def test_replicas_of_one_stage_are_like_one_device() -> None:
    scenarios = [whole_by_the_user, whole_in_configure_model]
    results = Results.collect(scenarios, Layout(pp=1, dp=2, microbatches=1))
    for scenario in scenarios:
        results.assert_like_one_device(scenario)


def whole_by_the_user(bench: Bench) -> dict[str, Tensor]:
    with _delayed(bench):
        model = _without_statistics(Net())
    return _train(bench, model)


def whole_in_configure_model(bench: Bench) -> dict[str, Tensor]:
    model = LateWithoutStatistics()
    config = {"config": {"delayed_parameter_initialization": True}}
    return _train(bench, model, smp=config if bench.is_smp else None)


class LateWithoutStatistics(Late):
    def configure_model(self) -> None:
        """Builds the layers."""
        super().configure_model()
        _without_statistics(self)


def _without_statistics(model: Net) -> Net:
    """Batch norm sees a replica's samples, so replicas would differ from one device."""
    model.first[1] = nn.Identity()
    return model


def test_the_engine_runs_a_deferred_model_as_an_eager_one() -> None:
    run_ranks(_rig_both, 2, timeout=100)


def _rig_both(rank: int, world_size: int) -> None:
    with gloo_group(60):
        found = [_rig(delayed) for delayed in (False, True)]
    for (name, eager), (_, deferred) in zip(*found, strict=True):
        assert torch.equal(eager, deferred), name


def _rig(delayed: bool) -> Sequence[tuple[str, Tensor]]:
    seed_everywhere(2, torch.device("cpu"))
    with smp.delay_param_initialization(enabled=delayed):
        module = Chain()
        copied = copy.deepcopy(module)
    assert all(is_deferred(p) == delayed for p in copied.parameters())
    rig = Rig(copied, HALVES)
    losses = rig.train(chain_loss, samples(1, 2)[0])
    state = [(name, p.detach()) for name, p in rig.local().items()]
    gradients = [(f"{name}.grad", p.grad) for name, p in rig.local().items()]
    return [*state, *gradients, *((f"loss {i}", loss) for i, loss in enumerate(losses))]
