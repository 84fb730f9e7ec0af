"""A module split by hand over two gloo ranks, and the engine that runs it, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_smp.engine import PipelineEngine
from lightning_smp.engine.channels import Channels
from lightning_smp.engine.control import Control
from lightning_smp.groups import Groups
from lightning_smp.lightning.partitioning import install_units, place_weights, plan_model
from lightning_smp.lightning.stepper import Stepper
from lightning_smp.placed.random import seed_everywhere
from lightning_smp.placed.runtime import Runtime
from lightning_smp.topology import Topology

__all__ = ["split_module", "stepper_of", "train_step"]

_RANKS = (0, 1)


def split_module(
    module: nn.Module, batch: Any, stages: dict[str, int], *, rank: int, pipeline: str
) -> PipelineEngine:
    """Gives each rank its stage of the module. Collective over the world.

    Args:
        module: has a ``training_step(batch, batch_index)``; equal on both ranks.
        batch: one microbatch.
        stages: rank by submodule name; all others are on rank 0.
        rank: this rank.
        pipeline: name of the schedule.
    """
    device = torch.device("cpu")
    seed_everywhere(0, device)  # as the strategy: the stages share one random state
    groups = Groups.build(Topology(2, 1, 1), rank, "gloo", timedelta(seconds=60))
    control = Control(_RANKS, groups.control)

    def call(copy: Any, piece: Any) -> Any:
        return copy.training_step(piece, 0)

    partition = plan_model(
        module, call, batch, 2, control, memory_weight=0.0, tied_parameters="mirrored",
        default_partition=0, manual=stages,
    )  # fmt: skip
    runtime = Runtime(rank, 2, device)
    ownership = install_units(module, partition, runtime)
    place_weights(module, ownership, runtime, [])
    channels = Channels(_RANKS, groups.pp, device)
    return PipelineEngine(runtime, channels, control, pipeline=pipeline, active_microbatches=None)


def stepper_of(module: nn.Module, engine: PipelineEngine) -> Stepper:
    """What the strategy runs steps with."""
    return Stepper(module=module, engine=engine, seeding=None, precision=nullcontext)


def train_step(stepper: Stepper, batch: Any, microbatches: int) -> Callable[[], None]:
    """A forward and backward over a batch as the strategy runs it; gradients are new each time."""
    parameters = list(stepper.module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        stepper.run(
            "training_step", (batch, 0), microbatches=microbatches, allow_uneven=False,
            seed=(0, 0, 0, 0), backward=True,
        )  # fmt: skip

    return step
