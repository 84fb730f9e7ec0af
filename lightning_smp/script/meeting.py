"""Calls of the API that all ranks of a group must make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_smp.deploy.agreement import different_calls
from lightning_smp.process_state import state
from lightning_smp.topology import Axis
from lightning_smp.wire import compare
from lightning_smp.wire.agree import DIGEST_BYTES

__all__ = ["meeting", "transport"]

_HOST = torch.device("cpu")


@contextmanager
def meeting(text: str, axis: Axis) -> Iterator[None]:
    """Compares what the ranks of a group are about to do, then does it. Collective over the group.

    Args:
        text: what the body does, equal on all ranks.
        axis: the group.

    Raises:
        CommunicationError: others of the group have come to another call; names who and what.
    """
    groups = state.groups
    ranks = groups.topology.group(axis, groups.rank)
    if len(ranks) == 1:
        yield
        return
    with state.calls.collective(text, axis):
        group, device = transport(axis)
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        _, texts = compare(digest, text, group, device)
        if texts:
            raise different_calls(ranks, texts)
        yield


def transport(axis: Axis) -> tuple[dist.ProcessGroup, torch.device]:
    """A group, on the hosts where there is one, and where its messages must lie."""
    groups = state.groups
    on_hosts = {
        "world": groups.world_control, "pp": groups.control, "tp": groups.tp_control,
        "mp": groups.mp_control,
    }  # fmt: skip
    if axis in on_hosts:
        return on_hosts[axis], _HOST
    found: dist.ProcessGroup = getattr(groups, axis)
    return found, state.device if state.backend == "nccl" else _HOST
