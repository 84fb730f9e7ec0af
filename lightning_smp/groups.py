"""The process groups of one run, made from the topology and handed around as an object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError, ConfigError
from lightning_smp.kept_groups import MESSAGES, KeptGroups, default_group
from lightning_smp.native.backend import SMP, bounded_backend, inner_of_smp
from lightning_smp.topology import Axis, Topology

__all__ = ["Groups"]

# A NCCL communicator takes up to 390 MiB of device memory with all its CTAs and 52 MiB with 8.
# Pipeline neighbours exchange one activation at a time, which 8 CTAs keep up with; a group of
# one rank moves nothing.
_PIPELINE_MAX_CTAS: Final = 8
_SINGLE_MAX_CTAS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that this rank belongs to.

    Attributes:
        topology: the grid of all ranks.
        rank: this rank's global number.
        pp: the stages of this rank's pipeline.
        dp: the ranks of this stage.
        rdp: the ranks that hold the same parameters.
        tp: the ranks that split one module with this one.
        mp: the ranks of this replica of the model.
        world: all ranks.
        control: gloo group of the pipeline, for messages between the hosts.
        tp_control: gloo group of the tensor group, likewise.
        mp_control: gloo group of the replica, likewise.
        world_control: gloo group of all ranks, for messages between the hosts.
        bounded_backend: the backend of dp, rdp and tp, and the one for further groups that reduce:
            the given one with a bound on collectives in flight, where all ranks have it.
        timeout: of one operation.
        kept: where further groups come from.
        default: the default process group in which the groups were made.

    Groups with the same members and backend are one object (with one stage, for example, tp is
    mp), so operations on them share one order.
    """

    topology: Topology
    rank: int
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    rdp: dist.ProcessGroup
    tp: dist.ProcessGroup
    mp: dist.ProcessGroup
    world: dist.ProcessGroup
    control: dist.ProcessGroup
    tp_control: dist.ProcessGroup
    mp_control: dist.ProcessGroup
    world_control: dist.ProcessGroup
    bounded_backend: str
    timeout: timedelta
    kept: KeptGroups = field(repr=False, compare=False)
    default: dist.ProcessGroup = field(repr=False, compare=False)

    @classmethod
    def build(
        cls, topology: Topology, rank: int, backend: str, timeout: timedelta,
        kept: KeptGroups | None = None,
    ) -> Groups:  # fmt: skip
        """Create the groups; the default process group must exist and have the topology's size.

        Collective over world: every rank must call, with the same topology and backend and
        before or after the same other groups, because each rank takes part in the creation of
        every group.

        Args:
            topology: the grid of all ranks.
            rank: this rank's global number.
            backend: of all groups but the control groups, "nccl" or "gloo" for example.
                Where that is possible, dp, rdp and tp bound their collectives in flight.
            timeout: of one operation.
            kept: groups that were made before and may be used again, alike on all ranks; by
                default there are none.

        Raises:
            CommunicationError: there is no default process group.
            ConfigError: its size or this rank's number is not that of the topology, or
                SMP_NCCL_THROTTLE_LIMIT is no limit.
        """
        _check_world(topology, rank)
        default = default_group()
        assert default is not None
        kept = KeptGroups() if kept is None else kept
        kept.begin()
        factory = _Factory(topology, rank, timeout, kept)
        world_control = factory.group("world", "gloo")
        if backend != "nccl":
            factory.make_message_groups()
        bounded = _agree_on_bounded(backend, world_control)
        return cls(
            topology=topology,
            rank=rank,
            world=factory.group("world", backend),
            world_control=world_control,
            bounded_backend=bounded,
            pp=factory.group("pp", backend),
            control=factory.group("pp", "gloo"),
            dp=factory.reducing_group("dp", backend, bounded),
            rdp=factory.reducing_group("rdp", backend, bounded),
            tp=factory.reducing_group("tp", backend, bounded),
            mp=factory.group("mp", backend),
            tp_control=factory.group("tp", "gloo"),
            mp_control=factory.group("mp", "gloo"),
            timeout=timeout,
            kept=kept,
            default=default,
        )

    def close(self) -> None:
        """Destroy the kept groups; the default group stays. Safe to call twice.

        Every rank should call, after its last operation on them.
        """
        if self.is_alive:
            self.kept.close()

    @property
    def is_alive(self) -> bool:
        """Whether the default process group is still the one in which the groups were made."""
        return self.default is default_group()

    def messages(self, axis: Literal["pp", "tp"]) -> dist.ProcessGroup:
        """The ranks of `pp` or `tp`, for what one sends to another over gloo.

        An error that leaves a call may leave messages under way; then there is a new group.
        """
        members = self.topology.group(axis, self.rank)
        group = self.kept.get(MESSAGES, members, "gloo", self.timeout)
        assert group is not None
        return group

    @property
    def pp_rank(self) -> int:
        """The stage of this rank."""
        return self.topology.pp_rank(self.rank)

    @property
    def pp_size(self) -> int:
        """Number of stages."""
        return self.topology.pp_size

    @property
    def tp_rank(self) -> int:
        """The tensor coordinate of this rank."""
        return self.topology.tp_rank(self.rank)

    @property
    def tp_size(self) -> int:
        """Number of ranks that split one module."""
        return self.topology.tp_size

    @property
    def rdp_rank(self) -> int:
        """The reduced-data coordinate of this rank."""
        return self.topology.rdp_rank(self.rank)

    @property
    def rdp_size(self) -> int:
        """Number of ranks that hold the same parameters."""
        return self.topology.rdp_size

    @property
    def dp_rank(self) -> int:
        """The position of this rank in `dp`."""
        return self.topology.dp_rank(self.rank)

    @property
    def dp_size(self) -> int:
        """Number of ranks of one stage."""
        return self.topology.dp_size

    @property
    def mp_rank(self) -> int:
        """The position of this rank in `mp`."""
        return self.topology.mp_rank(self.rank)

    @property
    def mp_size(self) -> int:
        """Number of ranks of one replica of the model."""
        return self.topology.mp_size

    def data_rank(self, prescaled: bool) -> int:
        """Which share of the data this rank loads.

        Args:
            prescaled: whether the ranks of a tensor group hold the same batch.
        """
        return self.rdp_rank if prescaled else self.dp_rank

    def data_size(self, prescaled: bool) -> int:
        """Number of shares of the data."""
        return self.rdp_size if prescaled else self.dp_size

    def data_group(self, prescaled: bool) -> dist.ProcessGroup:
        """The ranks with this rank's stage, one per share of the data."""
        return self.rdp if prescaled else self.dp

    def batch_sharers(self, prescaled: bool) -> tuple[tuple[int, ...], dist.ProcessGroup]:
        """Global ranks that hold the same batch as this one, and their group of the hosts."""
        if prescaled:
            return self.topology.group("mp", self.rank), self.mp_control
        return self.topology.group("pp", self.rank), self.control

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.topology.size


class _Factory:
    """Gets each group once per (members, backend) and remembers this rank's."""

    def __init__(self, topology: Topology, rank: int, timeout: timedelta, kept: KeptGroups) -> None:
        self.topology = topology
        self.rank = rank
        self.timeout = timeout
        self.kept = kept
        self.known: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        world = default_group()
        self.known[tuple(range(topology.size)), dist.get_backend(world)] = world

    def group(self, axis: Axis, backend: str) -> dist.ProcessGroup:
        """Return this rank's group of `axis`; every rank gets all of the axis, in order."""
        for members in self._wanted(axis, backend):
            options = partial(_options, axis, backend, len(members), self.timeout)
            self.known[members, backend] = self.kept.get(
                axis, members, backend, self.timeout, options
            )
        group = self.known[self.topology.group(axis, self.rank), backend]
        assert group is not None
        return group

    def reducing_group(self, axis: Axis, plain: str, bounded: str) -> dist.ProcessGroup:
        """As `group`, with a bound on collectives; a group of one rank has nothing to bound."""
        is_single = len(self.topology.group(axis, self.rank)) == 1
        return self.group(axis, plain if is_single else bounded)

    def make_message_groups(self) -> None:
        """Makes the groups of `Groups.messages`."""
        axes: tuple[Axis, ...] = ("pp", "tp")
        for members in (m for axis in axes for m in self.topology.groups(axis) if len(m) > 1):
            self.kept.get(MESSAGES, members, "gloo", self.timeout)

    def _wanted(self, axis: Axis, backend: str) -> Iterator[tuple[int, ...]]:
        return (m for m in self.topology.groups(axis) if (m, backend) not in self.known)


def _check_world(topology: Topology, rank: int) -> None:
    if not dist.is_initialized():
        raise CommunicationError(
            "Groups.build needs the default process group: call "
            "torch.distributed.init_process_group first."
        )
    if dist.get_world_size() != topology.size:
        raise ConfigError(
            f"The topology has {topology.size} ranks (pipeline {topology.pipeline} x tensor "
            f"{topology.tensor} x data {topology.reduced_data}), the process group has "
            f"{dist.get_world_size()}. Use Topology.from_world({dist.get_world_size()}, ...)."
        )
    if dist.get_rank() != rank:
        raise ConfigError(
            f"rank {rank}: the process group calls this rank {dist.get_rank()}; pass that."
        )


def _agree_on_bounded(backend: str, world: dist.ProcessGroup) -> str:
    """Return the bounded form of `backend` if every rank has it: all must make the same groups.

    Collective over `world`.
    """
    bounded = bounded_backend(backend)
    has_it = torch.tensor(int(bounded != backend))
    dist.all_reduce(has_it, dist.ReduceOp.MIN, group=world)
    return bounded if has_it.item() else backend


def _options(axis: Axis, backend: str, members: int, timeout: timedelta) -> Any:
    """Return NCCL options that keep small groups small; None where the default is right.

    The dp, tp and mp groups move gradients and activations at full bandwidth: default.
    """
    small = members == 1 or axis == "pp"
    is_nccl = backend == "nccl" or (backend == SMP and inner_of_smp() == "nccl")
    if not is_nccl or not small or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _SINGLE_MAX_CTAS if members == 1 else _PIPELINE_MAX_CTAS
    options._timeout = timeout
    return options
