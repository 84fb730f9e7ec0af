"""The process groups of this process, made once and used again by its later runs.

Torch keeps a group (threads, connections, a communicator) until the process ends, and a run's
groups may be needed after it, for a checkpoint. So a run does not close its groups; the next run
that needs groups of the same kinds takes them. Whether nothing is under way in them any more is
found out before it begins, see `reunion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_smp.native.backend import SMP, SMP_GLOO, log_counters
from lightning_smp.native.switches import throttle_limit

__all__ = ["MESSAGES", "GroupKind", "KeptGroups", "default_group"]

MESSAGES = "messages"
"""The purpose of groups for what one rank sends to another; they have no other operations."""


class GroupKind(NamedTuple):
    """What a group is made of.

    Attributes:
        purpose: groups for different ones have orders of operations of their own; it decides on the
            backend's options as well.
        ranks: global ranks of the members.
        backend: of torch.
        timeout: of one operation.
        limit: of collectives in flight, where the backend bounds them.
    """

    purpose: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    limit: int | None


class KeptGroups:
    """Makes each kind of group once, until the default process group is another one.

    Every rank of the world makes all groups, those of other ranks as well, in one order; so all
    ranks find a kind here, or none does.
    """

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._made: dict[GroupKind, dist.ProcessGroup | None] = {}
        self._options: dict[GroupKind, Callable[[], Any]] = {}

    @property
    def is_current(self) -> bool:
        """Whether the groups are those of the present default process group."""
        return self._world is not None and self._world is default_group()

    def begin(self) -> None:
        """Forgets groups of another default process group than the present one."""
        if not self.is_current:
            self._world, self._made, self._options = default_group(), {}, {}

    def get(
        self, purpose: str, ranks: tuple[int, ...], backend: str, timeout: timedelta,
        options: Callable[[], Any] | None = None,
    ) -> dist.ProcessGroup | None:  # fmt: skip
        """Returns the group of some ranks, None on all others. Collective over the world.

        Args:
            purpose: what the group is for.
            ranks: global ranks.
            backend: of torch.
            timeout: of one operation.
            options: gives the backend's options, if the group has to be made.
        """
        self.begin()
        limit = throttle_limit() if backend in (SMP, SMP_GLOO) else None
        kind = GroupKind(purpose, ranks, backend, timeout, limit)
        if kind not in self._made:
            self._options[kind] = options or _no_options
            self._make(kind)
        return self._made[kind]

    def _make(self, kind: GroupKind) -> None:
        made = dist.new_group(
            list(kind.ranks), timeout=kind.timeout, backend=kind.backend,
            pg_options=self._options[kind](), group_desc=f"smp_{kind.purpose}",
        )  # fmt: skip
        self._made[kind] = made if dist.get_rank() in kind.ranks else None

    def renew_messages(self) -> None:
        """Puts new groups in the place of those for messages. Collective over the world.

        Nothing may be needed any more of what is under way in them, on any rank.
        """
        for kind, group in self._made.items():
            if kind.purpose == MESSAGES:
                if group is not None:
                    dist.destroy_process_group(group)
                self._make(kind)

    def close(self) -> None:
        """Destroys all groups, the last made first; the default group stays. Safe to call twice.

        Every rank should call, after its last operation on them.
        """
        if self.is_current:
            for group in reversed([group for group in self._made.values() if group is not None]):
                log_counters(group)
                dist.destroy_process_group(group)
        self._made, self._options = {}, {}

    def kinds(self) -> list[GroupKind]:
        """All kinds, in the order in which they were made; equal on all ranks."""
        return list(self._made)

    def mine(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """This rank's groups of collectives, the default one too, by names equal on their ranks."""
        if self._world is not None:
            yield "world", self._world
        for number, (kind, group) in enumerate(self._made.items()):
            if group is not None and kind.purpose != MESSAGES:
                yield f"{number} {kind.purpose} {kind.ranks}", group


def _no_options() -> None:
    return None


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None while there is none."""
    return dist.group.WORLD if dist.is_initialized() else None
