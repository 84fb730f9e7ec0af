"""Ranks, sizes and groups of the running process, by SMP's names (pp, tp, rdp, dp, mp)."""

from __future__ import annotations

from lightning_smp.process_state import state

__all__ = [
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_rdp_group",
    "get_tp_group",
    "get_world_group",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]


def is_initialized() -> bool:
    """Whether the run has started, so that ranks exist."""
    return state.initialized


def rank() -> int:
    """Global rank of this process."""
    return state.groups.rank


def size() -> int:
    """Number of processes."""
    return state.groups.world_size


def local_rank() -> int:
    """Rank of this process on its node."""
    return state.local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return state.local_size


def pp_rank() -> int:
    """The stage of this rank."""
    return state.groups.pp_rank


def pp_size() -> int:
    """Number of stages."""
    return state.groups.pp_size


def tp_rank() -> int:
    """Place of this rank among those that split one module."""
    return state.groups.tp_rank


def tp_size() -> int:
    """Number of ranks that split one module."""
    return state.groups.tp_size


def rdp_rank() -> int:
    """Place of this rank among those that hold the same parameters."""
    return state.groups.rdp_rank


def rdp_size() -> int:
    """Number of ranks that hold the same parameters."""
    return state.groups.rdp_size


def dp_rank() -> int:
    """Place of this rank among those of its stage."""
    return state.groups.dp_rank


def dp_size() -> int:
    """Number of ranks of one stage."""
    return state.groups.dp_size


def mp_rank() -> int:
    """Place of this rank in its replica of the model."""
    return state.groups.mp_rank


def mp_size() -> int:
    """Number of ranks of one replica of the model."""
    return state.groups.mp_size


def get_pp_group() -> list[int]:
    """Global ranks of this rank's pipeline."""
    return _members("pp")


def get_tp_group() -> list[int]:
    """Global ranks that split modules with this one."""
    return _members("tp")


def get_rdp_group() -> list[int]:
    """Global ranks that hold the same parameters as this one."""
    return _members("rdp")


def get_dp_group() -> list[int]:
    """Global ranks of this rank's stage."""
    return _members("dp")


def get_mp_group() -> list[int]:
    """Global ranks of this rank's replica of the model."""
    return _members("mp")


def get_world_group() -> list[int]:
    """All global ranks."""
    return _members("world")


def _members(axis: str) -> list[int]:
    groups = state.groups
    return list(groups.topology.group(axis, groups.rank))  # type: ignore[arg-type]
