"""`smp.init`: from a launched process to ranks, groups and a device."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lightning_smp.config import KEYS, SMPConfig
from lightning_smp.config.sources import resolve_config
from lightning_smp.deploy.agreement import compare_configurations
from lightning_smp.errors import ConfigError
from lightning_smp.failure import FailureWatch
from lightning_smp.groups import Groups
from lightning_smp.process_state import state
from lightning_smp.script.launch import Place, find_place, rendezvous
from lightning_smp.script.mending import mend

__all__ = ["init", "is_tracing", "num_microbatches"]

_logger = logging.getLogger(__name__)

_TRAINER_KEYS = {
    "batch_source": "a script loads its own batches on every rank",
    "drop_last": "a script makes its own loaders",
    "timeline_every_n_steps": "a script has no loggers that a timeline could go to",
}


def init(config: SMPConfig | Mapping[str, object] | None = None) -> None:
    """Starts the run: makes ranks, groups and the device known. Collective over the world.

    The first call of a script. A second call changes nothing.

    Started by torchrun, by mpirun, or alone. Each process has a GPU of its own with NCCL; without
    GPUs there are CPU devices and gloo. What the launcher says, in the environment variable
    SMP_CONFIG or SM_HP_MP_PARAMETERS, wins over ``config``, key by key. An uncaught error of one
    rank is made known to the others, which end too.

    Args:
        config: keys of the configuration.

    Raises:
        ConfigError: an invalid key, a configuration that differs between ranks or from the one
            before, or more processes on a node than it has GPUs.
    """
    resolved = resolve_config(config, environment_wins=True)
    if state.initialized:
        if config is not None and resolved != state.cfg:
            raise ConfigError(
                "smp.init was called again with another configuration; a run has one. Call it "
                "once, or without arguments."
            )
        return
    _check_for_scripts(resolved)
    place = find_place()
    device = _device(place)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=resolved.timeout)
    topology = resolved.topology(place.size)
    for name, value in place.as_environment().items():
        os.environ.setdefault(name, value)
    if not dist.is_initialized():
        how: Any = rendezvous(place, resolved.ddp_port)
        dist.init_process_group(backend, timeout=timeout, **how)
        atexit.register(_end_groups)
    groups = Groups.build(topology, dist.get_rank(), backend, timeout, state.kept)
    compare_configurations(resolved, groups)
    state.start(resolved, groups, device, backend)
    if place.size > 1:
        _watch_failures(groups)


def is_tracing() -> bool:
    """Whether the step only runs to be analysed, on tensors without numbers."""
    return state.tracing


def num_microbatches() -> int:
    """How many parts a step splits its batch into."""
    cfg = state.cfg
    if cfg is None:
        raise ConfigError("smp.num_microbatches() needs smp.init() first.")
    return cfg.microbatches


def _check_for_scripts(config: SMPConfig) -> None:
    """Refuses what only the Lightning strategy can do.

    Raises:
        ConfigError: such a key is set.
    """
    for name, reason in _TRAINER_KEYS.items():
        value = getattr(config, name)
        if value != KEYS[name].default:
            raise ConfigError(
                f"smp.init(): {name} = {value!r}: {reason}. It is for the Lightning strategy; "
                "remove it."
            )
    if config.delayed_parameter_initialization:
        _logger.warning(
            "delayed_parameter_initialization: in a script it has no effect by itself. Build the "
            "model under `with smp.delay_param_initialization():`."
        )


def _device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_size > count:
        raise ConfigError(
            f"smp.init(): {place.local_size} processes were started on this node, which has "
            f"{count} GPUs. Start {count} processes on each node, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _watch_failures(groups: Groups) -> None:
    """Tells the other ranks of an error that ends this one, or a step of it."""
    watch = state.watch = FailureWatch(groups.rank, state.calls, groups.topology)
    state.calls.mend = partial(mend, watch)
    before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        model = state.model
        position = "" if model is None else model.deployment.position
        watch.report(error, groups.pp_rank, position)
        before(kind, error, trace)

    sys.excepthook = report
    atexit.register(lambda: watch.close(state.end or "ended its script"))


def _end_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
