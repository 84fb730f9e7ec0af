"""One training step of two processes: lightning_smp and torch.distributed.pipelining.

Both run the same stages on the same batch. Beside them run the stage's maths alone and the bare
messages alone, so that what is left of a contender's CPU time is its own overhead; and for 1F1B a
loop written by hand for just these two stages, whose overhead no library can go below.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from benchmarks.engine_setup import split_module, stepper_of, train_step
from benchmarks.measure import alternate

__all__ = ["Setting", "compare_steps"]

_PIPELINES = {"1F1B": "interleaved", "GPipe": "simple", "2 chunks": "interleaved"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is run.

    Attributes:
        schedule: a key of "1F1B", "GPipe", "2 chunks" (two virtual stages of each rank).
        width: features of every layer.
        rows: samples of a microbatch.
        layers: linear layers of a stage.
        microbatches: in a step.
        rounds: turns of each contender.
        repeats: steps in a turn.
    """

    schedule: str
    width: int
    rows: int
    layers: int
    microbatches: int
    rounds: int
    repeats: int

    @property
    def num_stages(self) -> int:
        """Stages of the whole model; stage s is on rank s % 2."""
        return 4 if self.schedule == "2 chunks" else 2


class Stage(nn.Module):
    """Linear layers and tanh, written out so that the whole is one unit."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.num_layers = layers
        for index in range(layers):
            self.add_module(f"layer_{index}", nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.num_layers):
            x = torch.tanh(self.get_submodule(f"layer_{index}")(x))
        return x


class Model(pl.LightningModule):
    """The stages in a row, as a user would write them."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        for stage in self.stages:
            x = stage(x)
        return nn.functional.mse_loss(x, y)


def compare_steps(rank: int, setting: Setting) -> dict[str, Any]:
    """Runs all contenders of one setting. Collective over the world."""
    torch.manual_seed(0)
    stages = [Stage(setting.width, setting.layers) for _ in range(setting.num_stages)]
    rows = setting.rows * setting.microbatches
    batch = (torch.randn(rows, setting.width), torch.randn(rows, setting.width))
    mine = [deepcopy(stage) for stage in stages[rank::2]]
    model = Model(deepcopy(stages))
    contenders = {
        "smp": _smp_step(rank, model, batch, setting),
        "torch": _torch_step(rank, mine, batch, setting),
        "maths": _maths_step([deepcopy(stage) for stage in mine], batch, rank, setting),
        "messages": _message_step(rank, batch, setting),
    }
    if setting.schedule == "1F1B":
        contenders["by hand"] = _step_by_hand(rank, deepcopy(mine[0]), batch, setting)
    for step in contenders.values():
        for _ in range(3):  # programs, schedules and shapes are known after two steps
            step()
    _check_equal(rank, model, mine)
    runs = alternate(
        contenders, microbatches=setting.microbatches, rounds=setting.rounds,
        repeats=setting.repeats,
    )  # fmt: skip
    return {name: [asdict(cost) for cost in costs] for name, costs in runs.items()}


def _smp_step(rank: int, model: Model, batch: Any, setting: Setting) -> Callable[[], None]:
    piece = tuple(t[: setting.rows] for t in batch)
    places = {f"stages.{s}": s % 2 for s in range(setting.num_stages)}
    pipeline = _PIPELINES[setting.schedule]
    deployment = split_module(model, piece, places, rank=rank, pipeline=pipeline)
    return train_step(stepper_of(deployment), batch, setting.microbatches)


def _torch_step(rank: int, stages: list[Stage], batch: Any, setting: Setting) -> Callable[[], None]:
    x, y = batch
    wrapped: list[Any] = [
        PipelineStage(stage, rank + 2 * k, setting.num_stages, torch.device("cpu"))
        for k, stage in enumerate(stages)
    ]
    loss = nn.functional.mse_loss
    schedule: Any
    if setting.schedule == "2 chunks":
        schedule = ScheduleInterleaved1F1B(wrapped, setting.microbatches, loss_fn=loss)
    else:
        kind = Schedule1F1B if setting.schedule == "1F1B" else ScheduleGPipe
        schedule = kind(wrapped[0], setting.microbatches, loss_fn=loss)
    parameters = [p for stage in stages for p in stage.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=[], return_outputs=False)

    return step


def _maths_step(stages: list[Stage], batch: Any, rank: int, setting: Setting) -> Callable[[], None]:
    """Forward and backward of this rank's stages on tensors that are there already."""
    m, last = setting.microbatches, len(stages) - 1
    inputs, targets = batch[0].chunk(m), batch[1].chunk(m)
    gradient = torch.randn_like(inputs[0])
    seed = torch.tensor(1.0 / m)
    parameters = [p for stage in stages for p in stage.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        for x, y in zip(inputs, targets, strict=True):
            for k, stage in enumerate(stages):
                is_first = rank == 0 and k == 0
                out = stage(x if is_first else x.detach().requires_grad_())
                if rank == 1 and k == last:
                    torch.autograd.backward(nn.functional.mse_loss(out, y), seed)
                else:
                    torch.autograd.backward(out, gradient)

    return step


def _message_step(rank: int, batch: Any, setting: Setting) -> Callable[[], None]:
    """The step's messages alone: as many each way as there are boundaries between stages."""
    group = dist.new_group([0, 1])
    payload = torch.randn_like(batch[0][: setting.rows])
    buffer = torch.empty_like(payload)

    def step() -> None:
        for _ in range(setting.microbatches * (setting.num_stages - 1)):
            receive = dist.irecv(buffer, group=group, group_src=1 - rank)
            send = dist.isend(payload, group=group, group_dst=1 - rank)
            assert receive is not None
            assert send is not None
            send.wait()
            receive.wait()

    return step


def _step_by_hand(rank: int, stage: Stage, batch: Any, setting: Setting) -> Callable[[], None]:
    """1F1B of two stages, written out: no graph of stages, no checks, no shapes but the one."""
    m = setting.microbatches
    inputs, targets = batch[0].chunk(m), batch[1].chunk(m)
    forward, backward = dist.new_group([0, 1]), dist.new_group([0, 1])
    parameters = list(stage.parameters())
    seed = torch.tensor(1.0 / m)

    def post(group: dist.ProcessGroup) -> tuple[Tensor, Any]:
        buffer = torch.empty_like(inputs[0])
        return buffer, dist.irecv(buffer, group=group, group_src=1 - rank)

    def send(tensor: Tensor, group: dist.ProcessGroup) -> Any:
        return dist.isend(tensor, group=group, group_dst=1 - rank)

    def first() -> None:
        outputs: list[Tensor | None] = []
        gradients, sends = [], []
        for index in range(m + 1):
            if index < m:
                gradients.append(post(backward))
                output = stage(inputs[index])
                outputs.append(output)
                sends.append(send(output.detach(), forward))
            if index > 0:
                gradient, work = gradients[index - 1]
                work.wait()
                torch.autograd.backward(outputs[index - 1], gradient)
                outputs[index - 1] = None
        for work in sends:
            work.wait()

    def last() -> None:
        sends = []
        received = [post(forward) for _ in range(m)]
        for target, (x, work) in zip(targets, received, strict=True):
            work.wait()
            loss = nn.functional.mse_loss(stage(x.requires_grad_()), target)
            torch.autograd.backward(loss, seed)
            assert x.grad is not None
            sends.append(send(x.grad, backward))
        for work in sends:
            work.wait()

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        if rank == 0:
            first()
        else:
            last()

    return step


def _check_equal(rank: int, model: Model, stages: list[Stage]) -> None:
    """Both made the same gradients, else there is nothing to compare."""
    ours = list(model.stages)[rank::2]
    for mine, theirs in zip(ours, stages, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
