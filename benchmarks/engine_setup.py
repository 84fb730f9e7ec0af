"""A module split by hand over two gloo ranks, and the engine that runs it, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_smp.config import SMPConfig
from lightning_smp.deploy.deployment import Deployment
from lightning_smp.groups import Groups
from lightning_smp.lightning.stepper import Stepper
from lightning_smp.placed.random import seed_everywhere
from lightning_smp.topology import Topology

__all__ = ["split_module", "stepper_of", "train_step"]


def split_module(
    module: nn.Module, batch: Any, stages: dict[str, int], *, rank: int, pipeline: str
) -> Deployment:
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
    config = SMPConfig(
        pipeline_parallel_degree=2, auto_partition=False, default_partition=0, pipeline=pipeline,
        tied_parameters="mirrored", memory_weight=0.0,
    )  # fmt: skip

    def call(copy: Any, piece: Any) -> Any:
        return copy.training_step(piece, 0)

    deployment = Deployment(module, config, groups, device, "gloo")
    deployment.ensure_ready(call, batch, manual=stages)
    return deployment


def stepper_of(deployment: Deployment) -> Stepper:
    """What the strategy runs steps with."""
    return Stepper(deployment=deployment, precision=nullcontext)


def train_step(stepper: Stepper, batch: Any, microbatches: int) -> Callable[[], None]:
    """A forward and backward over a batch as the strategy runs it; gradients are new each time."""
    parameters = list(stepper.deployment.module.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        stepper.run(
            "training_step", (batch, 0), microbatches=microbatches, allow_uneven=False,
            seed=(0, 0, 0, 0), backward=True,
        )  # fmt: skip

    return step
