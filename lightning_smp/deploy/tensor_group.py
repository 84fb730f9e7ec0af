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

from lightning_smp.batch_digest import batch_digest
from lightning_smp.deferred import become, fingerprint, is_deferred, value_of
from lightning_smp.errors import CommunicationError
from lightning_smp.groups import Groups
from lightning_smp.partitioning import Partition
from lightning_smp.partitioning.costs import AtomCost
from lightning_smp.partitioning.sharing import SharedParameter
from lightning_smp.tensor_parallel.module import shardings_of
from lightning_smp.trail import Trail, digest_of, first_difference
from lightning_smp.wire import all_gather_objects, broadcast_object, compare

__all__ = ["TensorGroup", "same_weights", "sync_tensors"]

_DIGEST_BYTES = 16
_EXCHANGED = "exchanged: "
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

    def agree(self, what: str, detail: Any, trail: Trail) -> None:
        """Compare what the ranks are about to do. Collective over tp.

        Args:
            what: the step or collective, for the message.
            detail: plain data that must be equal.
            trail: what split modules have exchanged since the last comparison.

        Raises:
            CommunicationError: on every rank, if something differs; names ranks and values.
        """
        if len(self._ranks) == 1:
            return
        exchanges = trail.taken()
        text = repr((what, detail, f"{_EXCHANGED}{digest_of(exchanges)}"))
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        _, texts = compare(digest, text, self._groups.tp_control)
        if texts:
            self._check_exchanges(texts, [trail.describe(one) for one in exchanges])
            self._raise_different(texts)

    def _check_exchanges(self, texts: Sequence[str], own: list[str]) -> None:
        """Say where the ranks' exchanges first differ, if they do."""
        if len({text.partition(_EXCHANGED)[2] for text in texts}) == 1:
            return
        if not all(_EXCHANGED in text for text in texts):
            return  # one of them is in a call of another kind
        everyone: Any = all_gather_objects(own, self._groups.tp_control)
        found = zip(self._ranks, first_difference(everyone), strict=True)
        raise CommunicationError(
            f"The ranks {list(self._ranks)} of one tensor group took different ways through split "
            "modules in the step before: "
            + ", ".join(f"rank {rank}: {what}" for rank, what in found)
            + " is where they first differ. They work on everybody's samples together, so what "
            "they have computed since is wrong. Let all of them take the same branch (decide it by "
            "a value that is reduced over smp.get_tp_process_group()), or give the group one batch "
            "with prescaled_batch=True."
        )

    def _raise_different(self, texts: Sequence[str]) -> None:
        lines = [f"rank {r}: {other}" for r, other in zip(self._ranks, texts, strict=True)]
        raise CommunicationError(
            f"The ranks {list(self._ranks)} of one tensor group are at different points or hold "
            "batches of different shapes: " + "; ".join(lines) + ". They work on everybody's "
            "samples together, so each needs as many batches as the others, of the same shapes. "
            "Use drop_last=True and pad to one length, or give the group one batch with "
            "prescaled_batch=True. If only their random streams differ: what each of them draws "
            "outside of split modules must be the same, so draw and seed alike on all of them, and "
            "put dropout between column-wise and row-wise layers into a 'block'."
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
    they are equal already, as they are after equal seeds. What is split already stays as it is.
    """
    if groups.tp_size == 1:
        return
    split = shardings_of(module)
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = [tensor for name, tensor in named if name not in split and _has_value(tensor)]
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
    if is_deferred(tensor):
        return fingerprint(tensor, _DIGEST_BYTES)
    return batch_digest(tensor.detach())  # made on the device: weights may be many gigabytes


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
