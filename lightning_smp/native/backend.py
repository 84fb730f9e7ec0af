"""The c10d backends "smp" and "smp_gloo": NCCL or gloo, with a bound on collectives in flight.

"smp" is around NCCL where a CUDA device is seen when this module registers it, and around gloo
elsewhere; "smp_gloo" is around gloo everywhere. `import lightning_smp.native` registers both; then
`init_process_group("smp")` and `new_group(backend="smp")` know them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.native.loading import load_backend
from lightning_smp.native.switches import NO_LIMIT, throttle_limit

__all__ = [
    "SMP",
    "SMP_GLOO",
    "Counters",
    "bounded_backend",
    "counters",
    "inner_of_smp",
    "log_counters",
    "num_operations",
    "register",
]

_log = logging.getLogger(__name__)

SMP: Final = "smp"
SMP_GLOO: Final = "smp_gloo"

# c10d::Backend has no stable Python type across the supported versions of torch.
_Backend: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Counters:
    """What the throttle of one group has done so far.

    Attributes:
        issued: collectives handed to it; a coalesced group is one.
        waited: those of them that had to wait for room.
        waited_s: seconds spent in these waits.
        in_flight: collectives not yet seen to be complete (0 without a bound).
        max_in_flight: the most of them at one time (0 without a bound).
    """

    issued: int
    waited: int
    waited_s: float
    in_flight: int
    max_in_flight: int


def register() -> None:
    """Make the names known to torch.distributed. Repeated calls change nothing."""
    for name, inner in ((SMP, inner_of_smp()), (SMP_GLOO, "gloo")):
        if name not in dist.Backend.backend_list:
            devices = list(dist.Backend.backend_capability[inner])
            create = partial(_create, inner)
            dist.Backend.register_backend(name, create, extended_api=True, devices=devices)


@cache
def inner_of_smp() -> str:
    """Return what "smp" is around in this process: "nccl" where it sees a CUDA device, or "gloo".

    Devices are counted through the driver's library: CUDA is not initialised, forks stay possible.
    """
    has_device = torch.version.cuda is not None and torch.cuda.device_count() > 0
    return "nccl" if has_device and dist.is_nccl_available() else "gloo"


def bounded_backend(backend: str) -> str:
    """Return the name of `backend` with a bound on collectives, or `backend` itself.

    The same name comes back where the native library is not loaded, where
    SMP_NCCL_THROTTLE_LIMIT is -1, and for backends other than "nccl" and "gloo".

    Raises:
        ConfigError: SMP_NCCL_THROTTLE_LIMIT is no limit.
    """
    if backend not in ("nccl", "gloo") or throttle_limit() == NO_LIMIT:
        return backend
    if load_backend().module is None:
        return backend
    register()
    if backend == inner_of_smp():
        return SMP
    return SMP_GLOO if backend == "gloo" else backend


def counters(group: dist.ProcessGroup) -> Counters | None:
    """Return what the throttle of `group` has counted; None if the group has no throttle."""
    throttled = _throttled(group)
    return None if throttled is None else Counters(**throttled.counters())


def log_counters(group: dist.ProcessGroup) -> None:
    """Log the counters of `group` at debug level, if it has a throttle."""
    if _log.isEnabledFor(logging.DEBUG) and (found := counters(group)) is not None:
        _log.debug("throttle of group %s: %s", group.group_desc or group.group_name, found)


def num_operations(group: dist.ProcessGroup) -> int:
    """Return how many operations this rank has begun in a group; NCCL leaves messages out."""
    found = {id(b): b for b in map(_unwrapped, map(group._get_backend, group._device_types))}
    return sum(backend._get_sequence_number_for_group() for backend in found.values())


def _throttled(group: dist.ProcessGroup) -> _Backend | None:
    module = load_backend().module
    if module is None:
        return None
    for device in group._device_types:
        backend = _unwrapped(group._get_backend(device))
        if isinstance(backend, module.ThrottledBackend):
            return backend
    return None


def _unwrapped(backend: _Backend) -> _Backend:
    """Without the checking wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return getattr(backend, "wrapped_pg", backend)


def _create(inner_name: str, group: Any, options: Any) -> _Backend:
    """Called by torch for each group of ours. Collective over the group, as its inner backend is.

    Args:
        inner_name: "nccl" or "gloo".
        group: torch's description of the group: store, rank, size, timeout, name and ranks.
        options: `pg_options` of the caller, those of the inner backend.
    """
    module = _required()
    make = _make_nccl if inner_name == "nccl" else _make_gloo
    inner = make(group, options)
    inner._set_sequence_number_for_group()
    return module.ThrottledBackend(
        inner, limit=throttle_limit(), polls=inner_name == "nccl", timeout=group.timeout
    )


def _required() -> ModuleType:
    loaded = load_backend()
    if loaded.module is None:
        raise UnsupportedError(
            f'backend "{SMP}" was asked for, but its native library is not loaded: '
            f'{loaded.reason}. Use "nccl" or "gloo", or build it (docs/native.md).'
        )
    return loaded.module


def _make_gloo(group: Any, options: Any) -> _Backend:
    gloo: Any = dist.ProcessGroupGloo
    arguments = (group.store, group.group_rank, group.group_size)
    if options is None:
        inner = gloo(*arguments, timeout=group.timeout)
    else:
        _check_options(options, gloo._Options, "gloo")
        options._timeout = group.timeout
        inner = gloo(*arguments, options)
    inner.options.global_ranks_in_group = group.global_ranks_in_group
    inner.options.group_name = group.group_id
    return inner


def _make_nccl(group: Any, options: Any) -> _Backend:
    kind = dist.ProcessGroupNCCL.Options
    if options is None:
        options = kind()
        options.is_high_priority_stream = False
    _check_options(options, kind, "NCCL")
    options._timeout = group.timeout
    # torch leaves them out for the default group; NCCL's split then reads past the end of the empty
    # list, unless the group is the first of its process.
    options.global_ranks_in_group = group.global_ranks_in_group or list(range(group.group_size))
    options.group_name = group.group_id
    source = _split_source()
    if source is not None:
        options.split_from = source
        options.split_color = _color(group.global_ranks_in_group)
    return dist.ProcessGroupNCCL(group.store, group.group_rank, group.group_size, options)


def _check_options(options: Any, kind: type, name: str) -> None:
    if not isinstance(options, kind):
        raise ConfigError(
            f'backend "{SMP}" was given pg_options of type {type(options).__name__}; here it is '
            f"around {name}: pass its {kind.__qualname__}, or None."
        )


def _split_source() -> _Backend | None:
    """The communicator that new ones must be split from: torch makes the other ranks join in.

    They do so whenever the default group was connected to its device at once.
    """
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    if world is None or not world.bound_device_id:
        return None
    backend = _unwrapped(world._get_backend(world.bound_device_id))
    inner = getattr(backend, "inner", backend)
    return inner if isinstance(inner, dist.ProcessGroupNCCL) else None


def _color(ranks: Sequence[int]) -> int:
    """The same number on all members of the new group; ranks outside it give no color."""
    return zlib.crc32(",".join(map(str, ranks)).encode()) & 0x7FFFFFFF
