"""Merge what a step returned for each microbatch into what it would have returned for the batch."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor

from lightning_smp.batch_tree import (
    Child,
    children_of,
    holds_arrays,
    is_array,
    is_plain_sequence,
    rebuild,
)

__all__ = ["merge_outputs", "weighted_mean"]


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns one value for the batch from one value per microbatch.

    | value in each microbatch                          | value for the batch              |
    |---------------------------------------------------|----------------------------------|
    | tensor or array with one row per sample           | concatenated along dimension 0   |
    | list or tuple with one entry per sample           | joined                           |
    | tensor without dimensions, real or complex; float | mean weighted by samples         |
    | tensor without dimensions, integer (a count)      | sum                              |
    | ints that are the microbatches' differing sizes   | sum                              |
    | ints that are the microbatches' equal sizes       | list: a count, or another number |
    | other int, bool, string, None, object: all equal  | that value                       |
    | mapping, dataclass, list, tuple of these          | the same container, merged       |
    | anything else                                     | list with one entry a microbatch |

    An int is not summed unless it is known to be a count: a step number would come out wrong. The
    list says so loudly; return `torch.tensor(count)`, or a float mean, to have it merged.

    Args:
        outputs: one value per microbatch, at least one. A single one is returned as it is.
        sizes: the number of samples of each microbatch.
    """
    assert len(outputs) == len(sizes), "one output per microbatch"
    assert outputs, "a batch has at least one microbatch"
    if len(outputs) == 1:
        return outputs[0]
    return _merge(list(outputs), list(sizes))


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the weighted mean of equally shaped tensors in their dtype (integers: as floats).

    Equal values come out exactly, and nothing is copied to the host.
    """
    stacked = torch.stack(list(values))
    is_number = stacked.ndim == 1 and stacked.is_floating_point() and not stacked.requires_grad
    if is_number and stacked.is_cpu:  # Python is at the numbers, and faster
        shares = weights if any(weights) else [1.0] * len(weights)
        return torch.scalar_tensor(_mean_of_floats(stacked.tolist(), shares), dtype=stacked.dtype)
    wide = torch.promote_types(stacked.dtype, torch.float32)
    if not stacked.dtype.is_floating_point and not stacked.dtype.is_complex:
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        wide = torch.float64 if stacked.device.type != "mps" else torch.float32
    else:
        dtype = stacked.dtype
    total = sum(weights)
    scale = [w / total for w in weights] if total else [1 / len(weights)] * len(weights)
    factors = torch.tensor(scale, dtype=wide, device=stacked.device)
    mean = (stacked.to(wide) * factors.view(-1, *[1] * (stacked.ndim - 1))).sum(0)
    return torch.where((stacked == stacked[0]).all(0), stacked[0].to(wide), mean).to(dtype)


def _merge(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if all(value is first for value in values) and type(first) is not int:
        return first  # made once, not once per microbatch (ints: small ones are shared objects)
    if {type(value) for value in values} == {int, float}:
        return _mean_of_floats(values, sizes)
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, Tensor):
        return _merge_tensors(values, sizes)
    if is_array(first):
        return _merge_arrays(values, sizes)
    if isinstance(first, float):
        return _mean_of_floats(values, sizes)
    if type(first) is int and values == sizes:
        return sum(values) if len(set(sizes)) > 1 else values
    if _are_sample_lists(values, sizes):
        return type(first)(item for value in values for item in value)
    return _merge_containers(values, sizes)


def _merge_tensors(values: list[Tensor], sizes: list[int]) -> Any:
    if _are_rows(values, sizes):
        return torch.cat(values)
    if any(value.ndim for value in values):
        return values
    if values[0].is_floating_point() or values[0].is_complex():
        return weighted_mean(values, sizes)
    if values[0].dtype is torch.bool:
        return values[0] if all(bool(value == values[0]) for value in values) else values
    return torch.stack(values).sum(dtype=values[0].dtype)


def _merge_arrays(values: list[Any], sizes: list[int]) -> Any:
    import numpy as np

    if _are_rows(values, sizes):
        return np.concatenate(values)
    return values


def _are_rows(values: list[Any], sizes: list[int]) -> bool:
    """Whether each value has one row per sample of its microbatch, and the rows have one shape."""
    if any(value.ndim == 0 for value in values):
        return False
    pairs = zip(values, sizes, strict=True)
    return all(
        value.shape[0] == size and value.shape[1:] == values[0].shape[1:] for value, size in pairs
    )


def _mean_of_floats(values: Sequence[float], sizes: Sequence[float]) -> float:
    if all([value == values[0] for value in values]):
        return values[0]
    total: float = sum(map(mul, values, sizes))
    return total / sum(sizes)


def _are_sample_lists(values: list[Any], sizes: list[int]) -> bool:
    """Whether each value is a list with one entry per sample, not a list of per-batch values.

    Lists as long as the microbatch may be either. Where all arrays in them have one row per sample,
    the list is one of per-batch values.
    """
    if not all(is_plain_sequence(value) for value in values):
        return False
    pairs = list(zip(values, sizes, strict=True))
    if any(len(value) != size for value, size in pairs):
        return False
    if len(set(sizes)) > 1 or not any(holds_arrays(value) for value in values):
        return True
    return not all(_has_rows_only(value, size) for value, size in pairs)


def _has_rows_only(value: Any, size: int) -> bool:
    if is_array(value):
        return bool(value.ndim == 0 or value.shape[0] == size)
    return all(_has_rows_only(child.value, size) for child in children_of(value) or ())


def _merge_containers(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    parts = [children_of(value) for value in values]
    if parts[0] is None or isinstance(first, (set, frozenset)):
        return first if all(_equal(first, value) for value in values) else values
    known: list[list[Child]] = [part for part in parts if part is not None]
    labels = [[child.label for child in part] for part in known]
    if any(label != labels[0] for label in labels):
        return values
    columns = zip(*known, strict=True)
    items = [_merge([child.value for child in column], sizes) for column in columns]
    return rebuild(first, known[0], items)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
