"""A run of the script API in a rank of `run_ranks`, in one or several layouts one after another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_smp.config import SMPConfig
from lightning_smp.groups import Groups
from lightning_smp.process_state import state
from lightning_smp.topology import Topology

__all__ = ["start"]


def start(**config: Any) -> None:
    """Starts a run of the given degrees; the default group must exist. Collective over world."""
    cfg = SMPConfig(**config)
    topology = Topology.from_world(
        dist.get_world_size(), pipeline=cfg.pipeline_parallel_degree, tensor=1
    )
    groups = Groups.build(topology, dist.get_rank(), "gloo", timedelta(seconds=30))
    state.start(cfg, groups, torch.device("cpu"), "gloo")
