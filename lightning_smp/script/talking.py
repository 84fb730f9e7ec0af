"""Messages and barriers between ranks, by SMP's names of groups and ranks."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch.distributed as dist

from lightning_smp.errors import ConfigError
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.process_state import state
from lightning_smp.script.meeting import meeting, transport
from lightning_smp.topology import Axis
from lightning_smp.wire import all_gather_objects, recv_object, send_object

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "CommGroup",
    "RankType",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "get_dp_process_group",
    "get_mp_process_group",
    "get_pp_process_group",
    "get_rdp_process_group",
    "get_tp_process_group",
    "get_world_process_group",
    "mp_barrier",
    "pp_barrier",
    "rdp_barrier",
    "recv_from",
    "send",
    "tp_barrier",
]


class CommGroup(Enum):
    """Groups of ranks; a member names the group that the calling rank is in."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """What a rank is counted in: the world, or a group that the calling rank is in."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD: Final = CommGroup.WORLD
MP_GROUP: Final = CommGroup.MP_GROUP
DP_GROUP: Final = CommGroup.DP_GROUP
PP_GROUP: Final = CommGroup.PP_GROUP
TP_GROUP: Final = CommGroup.TP_GROUP
RDP_GROUP: Final = CommGroup.RDP_GROUP
WORLD_RANK: Final = RankType.WORLD_RANK
MP_RANK: Final = RankType.MP_RANK
DP_RANK: Final = RankType.DP_RANK
PP_RANK: Final = RankType.PP_RANK
TP_RANK: Final = RankType.TP_RANK
RDP_RANK: Final = RankType.RDP_RANK


def send(obj: object, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to a rank, which must call `recv_from`; waits until it has gone out.

    Args:
        obj: tensors and plain data: None, numbers, strings, bytes, lists, tuples, dicts, sets,
            NumPy arrays and what else `lightning_smp.wire.dumps` names. Tensors that are on the
            sender's GPU arrive on the receiver's.
        dest_rank: who gets it.
        rank_type: what ``dest_rank`` is counted in.

    Raises:
        TypeError: a value of another type, on both sides; names its place.
        ConfigError: there is no such rank, or it is this one.
    """
    _send(_marked(obj), _other_rank("send", dest_rank, rank_type), "smp.send")


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Returns the object that a rank sends or broadcasts to this one; waits for it.

    Raises:
        ConfigError: there is no such rank, or it is this one.
        CommunicationError: the sender had an object that cannot travel.
    """
    source = _other_rank("recv_from", src_rank, rank_type)
    with state.calls.message(f"smp.recv_from(rank {source})", source, sends=False):
        return _unmarked(recv_object(source, _world()))


def broadcast(obj: object, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all others of a group, who call `recv_from`, not this function.

    Raises:
        TypeError: as `send`.
    """
    marked = _marked(obj)
    for rank in _members(group):
        if rank != state.groups.rank:
            _send(marked, rank, "smp.broadcast")


def allgather(obj: object, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of all ranks of a group, by rank in it. Collective over the group.

    Raises:
        TypeError: as `send`.
        CommunicationError: others of the group have come to another call.
    """
    axis = _axis(group, CommGroup)
    process_group, device = transport(axis)
    with meeting(f"smp.allgather({group.name})", axis):
        gathered = all_gather_objects(_marked(obj), process_group, device)
    return [_unmarked(part) for part in gathered]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for all ranks of a group. Collective over the group.

    Raises:
        CommunicationError: others of the group have come to another call.
    """
    axis = _axis(group, CommGroup)
    with meeting(f"smp.barrier({group.name})", axis):
        pass  # whoever has compared has met the others


def mp_barrier() -> None:
    """Waits for the ranks of this replica of the model."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Waits for the ranks of this stage."""
    barrier(CommGroup.DP_GROUP)


def pp_barrier() -> None:
    """Waits for the ranks of this pipeline."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """Waits for the ranks that split modules with this one."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """Waits for the ranks that hold the same parameters."""
    barrier(CommGroup.RDP_GROUP)


def get_world_process_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return state.groups.world


def get_mp_process_group() -> dist.ProcessGroup:
    """The group of this replica of the model."""
    return state.groups.mp


def get_dp_process_group() -> dist.ProcessGroup:
    """The group of this stage."""
    return state.groups.dp


def get_pp_process_group() -> dist.ProcessGroup:
    """The group of this pipeline."""
    return state.groups.pp


def get_tp_process_group() -> dist.ProcessGroup:
    """The group that splits modules with this rank."""
    return state.groups.tp


def get_rdp_process_group() -> dist.ProcessGroup:
    """The group that holds the same parameters."""
    return state.groups.rdp


def _world() -> dist.ProcessGroup:
    return state.groups.world_control


def _axis(group: object, kind: type[Enum]) -> Axis:
    if not isinstance(group, kind):
        known = ", ".join(f"smp.{kind.__name__}.{member.name}" for member in kind)
        raise ConfigError(f"{group!r} was given as a {kind.__name__}; use one of {known}.")
    axis: Axis = group.value
    return axis


def _members(group: CommGroup) -> tuple[int, ...]:
    groups = state.groups
    return groups.topology.group(_axis(group, CommGroup), groups.rank)


def _other_rank(what: str, rank: int, rank_type: RankType) -> int:
    groups = state.groups
    members = groups.topology.group(_axis(rank_type, RankType), groups.rank)
    if not 0 <= rank < len(members) or members[rank] == groups.rank:
        raise ConfigError(
            f"smp.{what}: {rank_type.name} {rank!r}; it must be another one of the {len(members)} "
            f"ranks of its group, from 0 to {len(members) - 1}."
        )
    return members[rank]


def _send(marked: object, rank: int, what: str) -> None:
    with state.calls.message(f"{what}(to rank {rank})", rank, sends=True):
        send_object(marked, rank, _world())


def _marked(obj: object) -> tuple[object, list[bool]]:
    """The object, and which of its tensors are on a device."""
    return obj, [tensor.device.type != "cpu" for tensor in iter_tensors(obj)]


def _unmarked(message: object) -> Any:
    assert isinstance(message, tuple)
    obj, flags = message
    supply = iter(flags)
    return map_tensors(obj, lambda t: t.to(state.device) if next(supply) else t)
