"""Joins the parts that the ranks of a tensor group hold, for files of one device, and cuts them.

The leader of each tensor group (the rank in the writer's pipeline) gets the full tensors; the
pipeline then brings them to the writer as if nothing had been split.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_smp.errors import CheckpointError
from lightning_smp.tensor_parallel.module import distributed_modules
from lightning_smp.tensor_parallel.record import Sharding
from lightning_smp.weights.collect import PipelineLinks, collect
from lightning_smp.weights.ownership import Ownership

__all__ = [
    "cut_optimizer_state",
    "cut_state",
    "join_parts",
    "optimizer_parts",
    "state_parts",
    "to_original",
]

_Key = TypeVar("_Key", bound=Hashable)


def join_parts(
    parts: Mapping[_Key, tuple[Tensor, Sharding]], links: PipelineLinks | None
) -> dict[_Key, Tensor]:
    """Return on the leader the full tensors, on the CPU; nothing on other ranks.

    Collective over the tensor group: each of its ranks must call, with the same keys.

    Args:
        parts: what this rank holds of each tensor, and its record. One tensor under several keys
            is one tensor afterwards.
        links: over the tensor group, from `PipelineLinks.over_tensor_group`; None for no group.
    """
    if links is None:
        return {}
    received = collect({(links.pp_rank, key): part for key, (part, _) in parts.items()}, links)
    if links.pp_rank != links.writer_stage:
        return {}
    full: dict[_Key, Tensor] = {}
    joined: dict[int, Tensor] = {}
    for key, (part, sharding) in parts.items():
        known = joined.get(part.data_ptr()) if part.numel() else None
        if known is None:
            shards = [
                part.detach().cpu() if rank == links.pp_rank else received.pop((rank, key))
                for rank in range(len(links.ranks))
            ]
            known = joined[part.data_ptr()] = sharding.unshard(shards)  # type: ignore[arg-type]
        full[key] = known
    return full


def state_parts(
    module: nn.Module, local: Mapping[str, Any], ownership: Ownership
) -> dict[str, tuple[Tensor, Sharding]]:
    """Return the entries of a state dict that are parts and real on this stage.

    An entry is known by its name, or, where a hook renamed it, by its memory.
    """
    shardings = ownership.tensor.shardings
    if not shardings:
        return {}
    named = dict([*module.named_parameters(), *module.named_buffers()])
    by_memory = {
        tensor.data_ptr(): (shardings[name], ownership.stages_of_name(name))
        for name, tensor in named.items()
        if name in shardings and tensor.data_ptr()
    }
    parts = {}
    for key, value in local.items():
        if not isinstance(value, Tensor):
            continue
        found = (shardings.get(key), ownership.stages_of_name(key))
        if found[0] is None:
            found = by_memory.get(value.data_ptr(), found)
        if found[0] is not None and ownership.pp_rank in (found[1] or (ownership.pp_rank,)):
            parts[key] = (value, found[0])
    return parts


def optimizer_parts(
    state: Mapping[Any, Mapping[Any, Any]],
    parameter_at: Mapping[int, nn.Parameter],
    ownership: Ownership,
) -> dict[tuple[Any, ...], tuple[Tensor, Sharding]]:
    """Return the values of an optimizer's state that are parts, by (place, name).

    Raises:
        CheckpointError: a tensor for a split parameter that is neither of its shape nor one number.
    """
    parts: dict[tuple[Any, ...], tuple[Tensor, Sharding]] = {}
    for place, sharding, values in _split_states(state, parameter_at, ownership):
        local = sharding.local_shape(ownership.tensor.tp.rank)
        for name, value in values.items():
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() == 0):
                continue
            if tuple(value.shape) != local:
                raise _unknown_shape(name, value, local)
            parts[(place, name)] = (value, sharding)
    return parts


def cut_optimizer_state(
    state: Mapping[Any, Any], parameter_at: Mapping[int, nn.Parameter], ownership: Ownership
) -> dict[Any, Any]:
    """Return the state of an optimizer with this rank's parts in the place of full tensors.

    What is a part already stays.

    Raises:
        CheckpointError: a tensor for a split parameter that is neither of its full shape nor one
            number.
    """
    rank = ownership.tensor.tp.rank
    cut = dict(state)
    for place, sharding, values in _split_states(state, parameter_at, ownership):
        cut[place] = dict(values)
        for name, value in values.items():
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() == 0):
                continue
            if tuple(value.shape) == sharding.local_shape(rank):
                continue
            if tuple(value.shape) != sharding.shape:
                raise _unknown_shape(name, value, sharding.shape)
            cut[place][name] = sharding.shard(value, rank)
    return cut


def cut_state(
    module: nn.Module, full: Mapping[str, Any], ownership: Ownership
) -> Mapping[str, Any]:
    """Return a full state dict with this rank's parts in the place of full tensors.

    Names and shapes may be those of the original modules. Values of other stages are not read.
    """
    tensor = ownership.tensor
    if not tensor.is_active:
        return full
    entries = dict(full)
    for prefix, inner in distributed_modules(module):
        _translate(entries, prefix, inner.from_original)
    for name, sharding in tensor.shardings.items():
        value = entries.get(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != sharding.shape:
            continue  # absent, or of a wrong shape: torch says so
        if ownership.pp_rank in (ownership.stages_of_name(name) or (ownership.pp_rank,)):
            entries[name] = sharding.shard(value, tensor.tp.rank)
        else:
            entries[name] = value.new_empty(()).expand(sharding.local_shape(tensor.tp.rank))
    return entries


def to_original(module: nn.Module, full: dict[str, Any], ownership: Ownership) -> None:
    """Give full entries the names and shapes of the original modules, in place."""
    if ownership.tensor.is_active:
        for prefix, inner in distributed_modules(module):
            _translate(full, prefix, inner.to_original)


def _translate(entries: dict[str, Any], prefix: str, translate: Any) -> None:
    """Replace the entries below `prefix` by what `translate` makes of them; order is kept."""
    start = f"{prefix}." if prefix else ""
    own = {key[len(start) :]: value for key, value in entries.items() if key.startswith(start)}
    new = translate(own)
    if new is own or not own:
        return
    before = list(entries.items())
    entries.clear()
    placed = False
    for key, value in before:
        if not key.startswith(start):
            entries[key] = value
        elif not placed:
            entries.update({start + name: item for name, item in new.items()})
            placed = True


def _split_states(
    state: Mapping[Any, Any], parameter_at: Mapping[int, nn.Parameter], ownership: Ownership
) -> Iterable[tuple[Any, Sharding, Mapping[Any, Any]]]:
    by_parameter = ownership.tensor.by_parameter
    for place, parameter in parameter_at.items():
        sharding = by_parameter.get(parameter)
        if sharding is not None and place in state and ownership.is_local(parameter):
            yield place, sharding, state[place]


def _unknown_shape(name: Any, value: torch.Tensor, wanted: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"The optimizer's state {name!r} has the shape {tuple(value.shape)} for a split parameter "
        f"of shape {wanted}; only states of the parameter's own shape, or of one number, can be "
        "joined over the tensor group and cut again. Use an optimizer that works element by "
        "element (Adam, AdamW, SGD), or tensor_parallel_degree=1."
    )
