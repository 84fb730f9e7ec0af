"""Partial state dicts of a tensor group of another size: records of what was split, and joining.

Pure functions. A part whose tensors are split says how (`records_of`). Of the parts that all ranks
of the former group wrote, `join_ranks` makes what a rank of the present group holds, or wholes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from lightning_smp.errors import CheckpointError
from lightning_smp.script.partial import PARTIAL_KEY
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["RECORDS_KEY", "has_records", "join_ranks", "records_of", "reslice"]

RECORDS_KEY: Final = "_smp_records"
"""In a part: how tensors are split, by key; of an optimizer's states, by place in its groups."""


def records_of(shardings: Mapping[Any, Sharding]) -> dict[Any, list[Any]]:
    """Returns how tensors are split, as plain data."""
    return {key: [s.dim, list(s.shape), s.ranges] for key, s in shardings.items()}


def has_records(obj: Any) -> bool:
    """Whether an object has a part in it that says how its tensors are split."""
    if isinstance(obj, Mapping):
        return RECORDS_KEY in obj or any(map(has_records, obj.values()))
    return type(obj) in (list, tuple) and any(map(has_records, obj))


def reslice(
    shards: Sequence[Tensor], former: Sharding, wanted: Sharding | None, rank: int
) -> Tensor:
    """Returns what a rank holds under one split of what the ranks of another one hold.

    Only the elements that are wanted are read.

    Args:
        shards: of all ranks of the former split, in order.
        former: how they were split.
        wanted: how the tensor is split now; None gives the whole tensor.
        rank: which part of that.

    Raises:
        CheckpointError: shapes that do not fit the records, or each other.
    """
    found = [tuple(shard.shape) for shard in shards]
    expected = [former.local_shape(r) for r in range(former.num_ranks)]
    if found != expected:
        raise CheckpointError(
            f"A checkpoint's parts have the shapes {found}; their records say {expected}. It was "
            "not written by smp.save_checkpoint, or was changed since: load another one."
        )
    if wanted is None:
        return former.unshard(shards)
    if wanted.shape != former.shape:
        raise CheckpointError(
            f"A split tensor of the checkpoint has the shape {former.shape}, the model's has "
            f"{wanted.shape}. Build the model with the sizes that it was saved with."
        )
    if wanted.dim != former.dim:
        return wanted.shard(former.unshard(shards), rank)
    result = shards[0].new_empty(wanted.local_shape(rank))
    for to, start, stop in _places(wanted, rank):
        for holder, shard in enumerate(shards):
            for at, first, last in _places(former, holder):
                low, high = max(start, first), min(stop, last)
                if low < high:
                    source = shard.narrow(former.dim, at + low - first, high - low)
                    result.narrow(wanted.dim, to + low - start, high - low).copy_(source)
    return result


def join_ranks(
    objs: Sequence[Any], wanted: Mapping[Hashable, Sharding] | None = None, rank: int = 0
) -> Any:
    """Makes one object of those of the ranks of a former tensor group; the rest is the first's.

    Args:
        objs: one object per rank, alike in structure, each of all stages (`partial.merge`).
        wanted: how tensors are split now, by key or place; by default none are.
        rank: which parts of them are wanted.

    Raises:
        CheckpointError: states of an optimizer that are not of their parameter's shape.
    """
    first = objs[0]
    if isinstance(first, Mapping) and RECORDS_KEY in first:
        return _join_parts(objs, wanted or {}, rank)
    if isinstance(first, Mapping):
        return {key: join_ranks([obj[key] for obj in objs], wanted, rank) for key in first}
    if type(first) in (list, tuple):
        return type(first)(join_ranks(column, wanted, rank) for column in zip(*objs, strict=True))
    return first


def _join_parts(
    parts: Sequence[Mapping[str, Any]], wanted: Mapping[Hashable, Sharding], rank: int
) -> dict[str, Any]:
    joined = {**parts[0], PARTIAL_KEY: False}
    records = {key: _sharding(plain) for key, plain in joined.pop(RECORDS_KEY).items()}
    if "param_groups" in joined:
        joined["state"] = dict(joined["state"])
        for place, record in records.items():
            if place in joined["state"]:
                states = [part["state"][place] for part in parts]
                joined["state"][place] = _join_states(states, record, wanted.get(place), rank)
        return joined
    for key, record in records.items():
        if key in joined:
            shards = [part[key] for part in parts]
            joined[key] = reslice(shards, record, wanted.get(key), rank)
    return joined


def _join_states(
    states: Sequence[Mapping[str, Any]], former: Sharding, wanted: Sharding | None, rank: int
) -> dict[str, Any]:
    joined = dict(states[0])
    for name, value in joined.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if tuple(value.shape) != former.local_shape(0):
            raise CheckpointError(
                f"The optimizer's state {name!r} has the shape {tuple(value.shape)} for a part of "
                f"shape {former.local_shape(0)}; only states of the parameter's own shape, or of "
                "one number, can be split anew. Keep the tensor-parallel degree, or pass "
                "load_optimizer=False."
            )
        joined[name] = reslice([state[name] for state in states], former, wanted, rank)
    return joined


def _sharding(plain: Sequence[Any]) -> Sharding:
    dim, shape, ranges = plain
    pairs = tuple(tuple((int(a), int(b)) for a, b in own) for own in ranges)
    return Sharding(int(dim), tuple(map(int, shape)), pairs)


def _places(sharding: Sharding, rank: int) -> Iterator[tuple[int, int, int]]:
    """Place in a rank's part, first index and that after the last, of each of its ranges."""
    at = 0
    for start, stop in sharding.ranges[rank]:
        yield at, start, stop
        at += stop - start
