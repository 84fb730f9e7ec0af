"""What the ranks of one tensor group must do alike, and how they find out that they do not.

Distributed modules communicate inside the model, so a rank that runs another step than its peers,
or on other shapes, would leave them waiting. Every step begins with a comparison of 16 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.deferred import become, is_deferred, value_of
from lightning_smp.errors import CommunicationError
from lightning_smp.groups import Groups
from lightning_smp.partitioning import Partition
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.partitioning.sharing import SharedParameter
from lightning_smp.wire import all_gather_objects, broadcast_object

__all__ = ["TensorGroup", "same_weights", "sync_tensors"]

_DIGEST_BYTES = 16
_PLAN_FIELDS = (
    "order", "mode", "floating", "slowest", "reason", "virtual_stages", "num_stages",
    "mutable_buffers",
)  # fmt: skip


class TensorGroup:
    """This rank's tensor group.

    Args:
        groups: the process groups of the run.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._ranks = groups.topology.group("tp", groups.rank)

    def agree(self, what: str, detail: Any) -> None:
        """Compare what the ranks are about to do. Collective over tp.

        Args:
            what: the step or collective, for the message.
            detail: plain data that must be equal.

        Raises:
            CommunicationError: on every rank, if something differs; names ranks and values.
        """
        if len(self._ranks) == 1:
            return
        text = repr((what, detail))
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(found, own, group=self._groups.tp_control)
        if any(not torch.equal(other, own) for other in found):
            self._raise_different(text)

    def _raise_different(self, text: str) -> None:
        everyone = all_gather_objects(text, self._groups.tp_control)
        lines = [f"rank {r}: {other}" for r, other in zip(self._ranks, everyone, strict=True)]
        raise CommunicationError(
            f"The ranks {list(self._ranks)} of one tensor group are at different points or hold "
            "batches of different shapes: " + "; ".join(lines) + ". They work on everybody's "
            "samples together, so each needs as many batches as the others, of the same shapes. "
            "Use drop_last=True and pad to one length, or give the group one batch with "
            "prescaled_batch=True."
        )

    def agree_on_partition(self, partition: Partition) -> Partition:
        """Return the first rank's partition, as uneven slices may have other costs.

        Collective over tp.
        """
        if len(self._ranks) == 1:
            return partition
        given: Any = broadcast_object(_to_plain(partition), self._ranks[0], self._groups.tp_control)
        return _from_plain(given)


def _to_plain(partition: Partition) -> dict[str, Any]:
    return {
        **{name: getattr(partition, name) for name in _PLAN_FIELDS},
        "stage_of": list(partition.stage_of.items()),
        "sharing": [(s.names, s.stages) for s in partition.sharing],
        "shared_buffers": [(s.names, s.stages) for s in partition.shared_buffers],
        "costs": [(name, asdict(cost)) for name, cost in partition.costs.items()],
    }


def _from_plain(plain: dict[str, Any]) -> Partition:
    return Partition(
        **{
            **plain,
            "stage_of": dict(plain["stage_of"]),
            "sharing": tuple(SharedParameter(*item) for item in plain["sharing"]),
            "shared_buffers": tuple(SharedParameter(*item) for item in plain["shared_buffers"]),
            "costs": {name: AtomCost(**cost) for name, cost in plain["costs"]},
        }
    )


def same_weights(module: nn.Module, groups: Groups) -> None:
    """Give the ranks of each tensor group the first one's weights. Collective over tp.

    Before a module is split, so that all take slices of the same tensors. Nothing is sent where
    they are equal already, as they are after equal seeds.
    """
    if groups.tp_size == 1:
        return
    tensors = [t for t in (*module.parameters(), *module.buffers()) if _has_value(t)]
    digests = [_digest(tensor) for tensor in tensors]
    everyone: list[Any] = all_gather_objects(digests, groups.tp_control)
    if any(len(other) != len(digests) for other in everyone):
        raise CommunicationError(
            "The ranks of a tensor group built different models. The module's __init__ and "
            "configure_model must do the same on every rank."
        )
    source = groups.topology.group("tp", groups.rank)[0]
    for place, tensor in enumerate(tensors):
        if any(other[place] != everyone[0][place] for other in everyone):
            on_host = _value(tensor).contiguous()
            dist.broadcast(on_host, source, group=groups.tp_control)
            with torch.no_grad():
                if is_deferred(tensor):
                    become(tensor, on_host)
                else:
                    tensor.copy_(on_host)


def _has_value(tensor: Tensor) -> bool:
    return is_deferred(tensor) or not tensor.is_meta


def _value(tensor: Tensor) -> Tensor:
    """Return the numbers on the host; made for the purpose where construction was deferred."""
    return (value_of(tensor) if is_deferred(tensor) else tensor).detach().cpu()


def _digest(tensor: Tensor) -> bytes:
    data = _value(tensor).contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=_DIGEST_BYTES).digest()


def sync_tensors(
    module: nn.Module,
    groups: Groups,
    split: Sequence[str],
    sync: Callable[[list[Tensor], Any, int], None],
) -> None:
    """Give every replica the first one's weights and buffers. Collective over dp.

    Args:
        module: the model.
        groups: the process groups.
        split: names of split tensors, which are equal over rdp only.
        sync: broadcasts tensors over a group from a global rank.
    """
    named = dict([*module.named_parameters(), *module.named_buffers()])
    parts = {name for name in split if name in named}
    whole = [tensor for name, tensor in named.items() if name not in parts]
    sync(whole, groups.dp, groups.topology.group("dp", groups.rank)[0])
    if groups.rdp_size > 1:
        own = [tensor for name, tensor in named.items() if name in parts]
        sync(own, groups.rdp, groups.topology.group("rdp", groups.rank)[0])
