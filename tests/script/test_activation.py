"""Checkpointed modules give the numbers of plain ones, wherever the stages cut."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lightning_smp as smp
from lightning_smp.config import SMPConfig
from lightning_smp.errors import ConfigError, PartitionError
from lightning_smp.placed.random import seed_everywhere
from lightning_smp.process_state import state
from lightning_smp.script.activation import (
    checkpoint,
    checkpoint_sequential,
    regions_of,
    set_activation_checkpointing,
)
from tests.placed.rig import Case, Rig, run_cases, samples
from tests.support.launch import gloo_group, run_ranks


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.__dict__["calls"] += 1
        return x + self.drop(self.second(torch.tanh(self.first(x)))) * scale


class Pair(nn.Module):
    """Takes and gives a tuple, as the layers of a transformer stack do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, mask = pair
        return torch.tanh(self.linear(value)) * mask, mask


class Stack(nn.Module):
    """Four blocks in a row; `how` is what the step does with them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(dropout) for _ in range(4)))
        self.head = nn.Linear(4, 1)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Pair() for _ in range(4)))
        self.head = nn.Linear(4, 1)


class Container(nn.Module):
    """A module of the user's own around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([Block()])[0]
        self.right = nn.ModuleList([Block()])[0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.right(torch.tanh(self.left(x))) * 2)


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Container(), Container())
        self.head = nn.Linear(4, 1)


HALVES = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}
ALTERNATING = {"layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1, "head": 0}
THREE = {"layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 1, "head": 1}
NESTED = {
    "layers.0.left": 0, "layers.0.right": 0, "layers.1.left": 1, "layers.1.right": 1, "head": 1,
}  # fmt: skip
ACROSS = {
    "layers.0.left": 0, "layers.0.right": 1, "layers.1.left": 0, "layers.1.right": 1, "head": 1,
}  # fmt: skip


def plain(model: Any, x: Tensor, number: int) -> Tensor:
    return model.head(model.layers(x)).square().mean()


def pairs(model: Any, x: Tensor, number: int) -> Tensor:
    value, _ = model.layers((x, (x > 0).to(x.dtype)))
    return model.head(value).square().mean()


def called(model: Any, x: Tensor, number: int) -> Tensor:
    x = checkpoint(model.layers[0], x, scale=0.5)
    x = checkpoint(model.layers[1], x)
    x = checkpoint_sequential(model.layers[2:], x, strategy="contiguous")
    return model.head(x).square().mean()


def each_block(model: Any) -> None:
    for block in model.layers:
        set_activation_checkpointing(block)


def inside(model: Any) -> None:
    for block in model.layers:
        set_activation_checkpointing(block.second, preserve_rng_state=False)


def all_layers(model: Any, strategy: str) -> None:
    set_activation_checkpointing(
        model.layers, strategy=strategy, pack_args_as_tuple=isinstance(model, Pairs)
    )


CASES = {
    "unit": Case(make=Stack, stages=HALVES, step=plain, prepare=each_block),
    "unit, ping-pong": Case(make=Stack, stages=ALTERNATING, step=plain, prepare=each_block),
    "inside a unit": Case(make=Stack, stages=HALVES, step=plain, prepare=inside),
    "called": Case(make=Stack, stages=HALVES, step=called),
    "container": Case(make=Nest, stages=NESTED, step=plain, prepare=each_block),
    "container on two stages": Case(make=Nest, stages=ACROSS, step=plain, prepare=each_block),
    **{
        f"{strategy}, {name}": Case(
            make=make, stages=stages, step=step, prepare=partial(all_layers, strategy=strategy),
            pipelines=("interleaved",),
        )
        for strategy, name, make, stages, step in (
            ("each", "halves", Stack, HALVES, plain),
            ("each", "pairs", Pairs, HALVES, pairs),
            ("contiguous", "halves", Stack, HALVES, plain),
            ("contiguous", "ping-pong", Stack, ALTERNATING, plain),
            ("contiguous", "pairs", Pairs, HALVES, pairs),
            ("group_2", "three and one", Stack, THREE, plain),
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str]]:
    return run_ranks(run_cases, 2, CASES, timeout=120)


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_those_of_one_device(name: str, two_ranks: list[dict[str, str]]) -> None:
    assert [failures.get(name, "") for failures in two_ranks] == [""] * 2


def dropout_twice(rank: int, world_size: int) -> dict[str, Any]:
    with gloo_group(60):
        seed_everywhere(3, torch.device("cpu"))
        model = Stack(0.5)
        rigs = []
        for strategy in (None, "each", "contiguous"):
            split = copy.deepcopy(model)
            if strategy is not None:
                set_activation_checkpointing(split.layers, strategy=strategy)
            rig = Rig(split, HALVES)
            for microbatches in samples(2, 3):
                rig.train(plain, microbatches)
            rigs.append(rig)
        gradients = [[p.grad for p in rig.local().values()] for rig in rigs]
        calls = [[block.calls for block in rig.module.layers] for rig in rigs]
        return {"gradients": gradients, "calls": calls}


def test_dropout_is_the_same_when_it_runs_again() -> None:
    for rank, result in enumerate(run_ranks(dropout_twice, 2)):
        once, each, contiguous = result["gradients"]
        assert any(gradient.abs().max() > 0 for gradient in once)
        torch.testing.assert_close(each, once, rtol=0, atol=0)
        torch.testing.assert_close(contiguous, once, rtol=0, atol=0)
        here = slice(2 * rank, 2 * rank + 2)
        for calls, factor in zip(result["calls"], (1, 2, 2), strict=True):
            assert calls[here] == [6 * factor] * 2  # three microbatches, two steps


def visits(model: Any, x: Tensor, reentrant: bool | None) -> Tensor:
    """Two visits of each unit, which draw differently; None: without torch's own checkpoint."""
    for block in model.layers:
        for _ in range(2):
            x = block(x) if reentrant is None else torch_checkpoint(
                block, x * 1, use_reentrant=reentrant
            )  # fmt: skip
    return model.head(x).square().mean()


@smp.step
def smp_step(model: Any, x: Tensor, call: Any) -> Tensor:
    loss = call(model.get_module(), x.requires_grad_())
    model.backward(loss)
    return loss


def through_the_api(
    rank: int, world_size: int, strategy: str | None, call: Any = None
) -> list[float]:
    smp.init({"partitions": world_size, "microbatches": 2})
    torch.manual_seed(3)
    model = smp.DistributedModel(Stack(0.5))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    if strategy is not None:
        smp.set_activation_checkpointing(model.get_module().layers, strategy=strategy)
    losses = []
    for [x] in samples(4, 1, size=4):
        optimizer.zero_grad()
        step_loss = smp_step(model, x, call or partial(plain, number=0))
        losses.append(step_loss.reduce_mean().item())
        optimizer.step()
    return losses


def test_through_the_api() -> None:
    [expected] = run_ranks(through_the_api, 1, None)
    for stages, strategy in ((1, "each"), (2, "contiguous")):
        for losses in run_ranks(through_the_api, stages, strategy):
            assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_on_one_stage(reentrant: bool) -> None:
    [expected] = run_ranks(through_the_api, 1, None, partial(visits, reentrant=None))
    [losses] = run_ranks(through_the_api, 1, None, partial(visits, reentrant=reentrant))
    assert losses == pytest.approx(expected, rel=1e-6)


def by_hand(rank: int, world_size: int) -> str:
    with gloo_group(60):
        state.cfg = SMPConfig(auto_partition=False, default_partition=0)
        seed_everywhere(3, torch.device("cpu"))
        model = Nest()
        each_block(model)
        rig = Rig(model, ACROSS)
        with pytest.raises(PartitionError) as caught:
            rig.train(plain, samples(1, 2)[0])
        return str(caught.value)


def test_manual_partition_across_a_region_is_refused() -> None:
    for message in run_ranks(by_hand, 2):
        assert "Container" in message
        assert "[0, 1]" in message


def automatic(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("lightning_smp").addHandler(Keep())
    with gloo_group(60):
        seed_everywhere(3, torch.device("cpu"))
        model = Nest()
        each_block(model)
        rig = Rig(model, ACROSS)
        for microbatches in samples(2, 2):
            rig.train(plain, microbatches)
    return [message for message in messages if "has no effect" in message]


def test_automatic_partition_across_a_region_warns_once_and_goes_on() -> None:
    for messages in run_ranks(automatic, 2):
        assert len(messages) == 2  # one for each of the two containers


def test_regions() -> None:
    stages = [0, 0, None, 1, -5, 1, 1]
    assert regions_of(list(stages), "each") == [1] * 7
    assert regions_of(list(stages), "contiguous") == [3, 1, 1, 2]
    assert regions_of(list(stages), "group_2") == [2, 1, 1, 1, 2]
    assert regions_of([None, None, None], "group_2") == [2, 1]
    assert regions_of([], "contiguous") == []


def test_one_device_and_copies() -> None:
    torch.manual_seed(3)
    model = Stack(0.5)
    set_activation_checkpointing(model.layers, strategy="group_3")
    each_block(model)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 4)
    results = []
    for module in (model, copied):
        torch.manual_seed(4)
        loss = plain(module, x, 0)
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert model.layers[0].calls > copied.layers[0].calls == 1
    with torch.no_grad():
        before = model.layers[0].calls
        plain(model, x, 0)
        assert model.layers[0].calls == before + 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: checkpoint(torch.tanh, torch.ones(1)), "nn.Module"),  # type: ignore[arg-type]
        (lambda: checkpoint_sequential(Block(), torch.ones(1)), "checkpoint"),  # type: ignore[arg-type]
        (lambda: set_activation_checkpointing(Block(), strategy="group_2"), "nn.Sequential"),
        (lambda: set_activation_checkpointing(Block(), pack_args_as_tuple=True), "Sequential"),
        (lambda: set_activation_checkpointing(nn.Sequential(), strategy="group_0"), "group_x"),
        (lambda: set_activation_checkpointing(nn.Sequential(), strategy="all"), "contiguous"),
    ],
)
def test_arguments_that_cannot_be_meant(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
