"""Cut a batch into microbatches (views, never copies); no communication.

Terms: the batch size is the size of dimension 0, which all tensors of a batch must share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_smp.batch_digest import batch_digest
from lightning_smp.batch_merge import merge_outputs
from lightning_smp.batch_tree import (
    Child,
    children_of,
    holds_arrays,
    is_array,
    is_plain_sequence,
    rebuild,
)
from lightning_smp.errors import ConfigError, UnsupportedError

__all__ = ["Axes", "Microbatch", "batch_digest", "batch_size", "merge_outputs", "split_batch"]

Axes: TypeAlias = Mapping[Any, int | None]
"""Split axis by top-level key (or index, or field name); None: do not split what is there."""

_FIX = "set microbatches=1, or give its class an `smp_slice(num_mb, mb, axis)` method"


class Microbatch(NamedTuple):
    """One piece of a batch.

    Attributes:
        value: like the batch, with views of the samples [start, start + num_samples).
        num_samples: the weight of this piece in means over the batch.
        start: index of its first sample in the batch.
    """

    value: Any
    num_samples: int
    start: int


def batch_size(batch: Any) -> int | None:
    """Returns the size of dimension 0 that all tensors and arrays in `batch` share.

    Where there are none, the common length of its lists of plain values (strings, numbers). None
    where nothing has a size or sizes differ: then a batch has no size to weight it by.
    """
    sizes = {size for _, size in _array_sizes(batch, "batch", 0)}
    if not sizes:
        sizes = {size for _, size in _sequence_sizes(batch, "batch")}
    return sizes.pop() if len(sizes) == 1 else None


def split_batch(
    batch: Any, microbatches: int, *, allow_uneven: bool, axes: Axes | None = None
) -> list[Microbatch]:
    """Cuts `batch` into microbatches along dimension 0, keeping the types of its containers.

    Tensors and NumPy arrays with at least one dimension are narrowed (views). Lists and tuples as
    long as the batch that hold no tensors are sliced. Objects with `smp_slice(num_mb, mb, axis)`
    are split by it. Tensors without dimensions and all other objects are passed through. With
    `microbatches=1` the batch itself is returned, whatever it is.

    Args:
        batch: anything a dataloader yields.
        microbatches: how many pieces, at least 1.
        allow_uneven: pieces may differ by one sample (the first ones are larger), and a batch
            smaller than `microbatches` gives fewer of them, never an empty one.
        axes: other split axes by top-level key; None as an axis passes the entry through.

    Raises:
        ConfigError: the batch is empty or has no tensor, a tensor does not have the batch's size,
            or the batch is not divisible and `allow_uneven` is False.
        UnsupportedError: a value cannot be split at all: sparse and nested tensors,
            `PackedSequence`, objects that hold tensors.
    """
    if microbatches < 1:
        raise ConfigError(f"microbatches={microbatches} was asked; it must be at least 1.")
    if microbatches == 1:
        return [Microbatch(batch, _weight(batch), 0)]
    size = None if axes else _size_of_flat(batch)
    axis_of = None if size is not None else _AxisOf.parse(batch, axes)
    if axis_of is not None:
        size = _common_size(batch, axis_of, microbatches)
    bounds = _bounds(size, microbatches, allow_uneven)
    if len(bounds) == 1:
        return [Microbatch(batch, bounds[0][1], 0)]
    if axis_of is None:
        values = _split_flat(batch, bounds)
    else:
        values = _Splitter(size, bounds).split_top(batch, axis_of)
    return [
        Microbatch(value, length, start)
        for value, (start, length) in zip(values, bounds, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _AxisOf:
    """The split axis of each top-level entry of a batch."""

    axes: Axes

    @classmethod
    def parse(cls, batch: Any, axes: Axes | None) -> _AxisOf:
        if axes:
            known = [child.key for child in children_of(batch) or ()]
            unknown = [key for key in axes if key not in known]
            if unknown:
                raise ConfigError(
                    f"Split axes were given for {', '.join(map(repr, unknown))}, which the batch "
                    f"does not have; its entries are {', '.join(map(repr, known)) or 'none'}."
                )
        return cls(axes or {})

    def __call__(self, child: Child) -> int | None:
        return self.axes.get(child.key, 0)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """Splits values along the batch dimension.

    Attributes:
        size: the batch size; None if only objects with `smp_slice` are split.
        bounds: (start, length) of each microbatch.
    """

    size: int | None
    bounds: list[tuple[int, int]]

    def split_top(self, batch: Any, axis_of: _AxisOf) -> list[Any]:
        children = children_of(batch)
        if not axis_of.axes or children is None:
            return self.split(batch, "batch", 0)
        pieces = [self.split(c.value, f"batch{c.label}", axis_of(c)) for c in children]
        return self._rebuild(batch, children, pieces)

    def split(self, value: Any, path: str, axis: int | None) -> list[Any]:
        """Returns the piece of `value` for each microbatch."""
        if axis is None:
            return [value] * len(self.bounds)
        if is_array(value):
            return self._split_array(value, path, axis)
        if hasattr(type(value), "smp_slice"):
            count = len(self.bounds)
            return [value.smp_slice(count, index, axis) for index in range(count)]
        _refuse_packed(value, path)
        if self._is_sample_list(value, path):
            return [value[start : start + length] for start, length in self.bounds]
        children = children_of(value)
        if children is None:
            _refuse_object(value, path)
            return [value] * len(self.bounds)
        pieces = [self.split(child.value, f"{path}{child.label}", axis) for child in children]
        return self._rebuild(value, children, pieces)

    def _rebuild(self, value: Any, children: list[Child], pieces: list[list[Any]]) -> list[Any]:
        pairs = zip(children, pieces, strict=True)
        if all(piece is child.value for child, list_ in pairs for piece in list_):
            return [value] * len(self.bounds)  # nothing to split: the object keeps its identity
        return [rebuild(value, children, items) for items in zip(*pieces, strict=True)]

    def _split_array(self, value: Any, path: str, axis: int) -> list[Any]:
        _refuse_layout(value, path)
        if value.ndim == 0:
            return [value] * len(self.bounds)
        dim = _dimension(value, path, axis)
        if isinstance(value, Tensor):
            return [value.narrow(dim, start, length) for start, length in self.bounds]
        index = (slice(None),) * dim
        return [value[(*index, slice(start, start + length))] for start, length in self.bounds]

    def _is_sample_list(self, value: Any, path: str) -> bool:
        """Whether `value` is a list with one entry per sample."""
        if not is_plain_sequence(value) or len(value) != self.size:
            return False
        if _is_leaf_list(value):
            return True
        if holds_arrays(value):
            return False
        if all(is_plain_sequence(item) and len(item) == self.size for item in value):
            raise ConfigError(
                f"{path} is a list of {self.size} lists of {self.size} values and the batch size "
                f"is {self.size}: it cannot be told which of the two levels has one entry per "
                f"sample. Use a tensor or an array there, another batch size, or {_FIX}."
            )
        return True


def _size_of_flat(batch: Any) -> int | None:
    """The size of a flat batch, a tuple, list or dict of plain tensors of one size; else None.

    Most batches are flat, and each step cuts one: looking for containers takes far longer.
    """
    if type(batch) is dict:
        members = batch.values()
    elif type(batch) is tuple or type(batch) is list:
        members = batch
    else:
        return None
    size: int | None = None
    for member in members:
        if type(member) is not Tensor or not member.ndim or not _is_dense(member):
            return None
        if size is None:
            size = member.shape[0]
        elif member.shape[0] != size:
            return None
    return size


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _split_flat(batch: Any, bounds: list[tuple[int, int]]) -> list[Any]:
    """The pieces of a flat batch."""
    parts = [slice(start, start + length) for start, length in bounds]
    if type(batch) is dict:
        return [dict(zip(batch, row, strict=True)) for row in _rows(batch.values(), parts)]
    rows = _rows(batch, parts)
    return list(rows if type(batch) is tuple else map(list, rows))


def _rows(tensors: Iterable[Tensor], parts: list[slice]) -> Iterator[tuple[Tensor, ...]]:
    """For each part that of all tensors (the same views as by `narrow`, twice as fast)."""
    return zip(*[[tensor[part] for part in parts] for tensor in tensors], strict=True)


def _weight(batch: Any) -> int:
    size = batch_size(batch)
    return 1 if size is None else size


def _common_size(batch: Any, axis_of: _AxisOf, microbatches: int) -> int | None:
    """Returns the batch size that all tensors share; None if only `smp_slice` objects are there."""
    children = children_of(batch)
    if not axis_of.axes or children is None:
        entries: list[tuple[str, Any, int | None]] = [("batch", batch, 0)]
    else:
        entries = [(f"batch{c.label}", c.value, axis_of(c)) for c in children]
    split = [(path, value, axis) for path, value, axis in entries if axis is not None]
    sizes = [pair for path, value, axis in split for pair in _array_sizes(value, path, axis)]
    if not sizes:
        sizes = [pair for path, value, _ in split for pair in _sequence_sizes(value, path)]
    for path, size in sizes:
        if size != sizes[0][1]:
            _raise_mismatch(sizes[0], (path, size), microbatches)
    if not sizes and not any(_has_smp_slice(value) for _, value, _ in split):
        for path, value, _ in split:
            _refuse_inside(value, path)
        raise ConfigError(
            f"The batch ({type(batch).__name__}) was to be split into {microbatches} microbatches, "
            "but it has no tensor with a batch dimension. Return tensors from the dataset, or "
            f"{_FIX}."
        )
    return sizes[0][1] if sizes else None


def _array_sizes(value: Any, path: str, axis: int) -> Iterator[tuple[str, int]]:
    """Yields (path, size along `axis`) of each tensor or array that has dimensions."""
    if is_array(value):
        if value.ndim > 0 and not (isinstance(value, Tensor) and value.is_nested):
            yield path, value.shape[_dimension(value, path, axis)]
        return
    if hasattr(type(value), "smp_slice") or isinstance(value, PackedSequence):
        return
    for child in children_of(value) or ():
        yield from _array_sizes(child.value, f"{path}{child.label}", axis)


def _sequence_sizes(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yields (path, length) of each list or tuple of values that are no containers."""
    children = children_of(value)
    if not children or hasattr(type(value), "smp_slice"):
        return
    if _is_leaf_list(value):
        yield path, len(value)
        return
    for child in children:
        yield from _sequence_sizes(child.value, f"{path}{child.label}")


def _is_leaf_list(value: Any) -> bool:
    """Whether `value` is a list or tuple of strings, numbers or other objects that stay whole.

    Objects that hold tensors count in a list of one type, as a list of graphs; a pair of such
    objects is not a list of two samples.
    """
    if not is_plain_sequence(value):
        return False
    for item in value:
        if is_array(item) or hasattr(type(item), "smp_slice") or children_of(item) is not None:
            return False
    if any(holds_arrays(item) for item in value):
        return isinstance(value, list) and len({type(item) for item in value}) == 1
    return True


def _has_smp_slice(value: Any) -> bool:
    if hasattr(type(value), "smp_slice"):
        return True
    return any(_has_smp_slice(child.value) for child in children_of(value) or ())


def _bounds(size: int | None, microbatches: int, allow_uneven: bool) -> list[tuple[int, int]]:
    """Returns (start, length) of each microbatch."""
    if size is None:
        return [(index, 1) for index in range(microbatches)]
    if size == 0:
        raise ConfigError(
            f"An empty batch (size 0) was to be split into {microbatches} microbatches; a batch "
            "needs at least one sample. Make the sampler skip it, or set microbatches=1."
        )
    if size % microbatches and not allow_uneven:
        _raise_indivisible(size, microbatches)
    count = min(size, microbatches)
    base, extra = divmod(size, count)
    lengths = [base + 1] * extra + [base] * (count - extra)
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _dimension(value: Any, path: str, axis: int) -> int:
    if not -value.ndim <= axis < value.ndim:
        raise ConfigError(
            f"{path} was to be split along axis {axis}, but its shape is {tuple(value.shape)}. "
            "Give an axis it has, or None to pass it through."
        )
    return axis % int(value.ndim)


def _raise_indivisible(size: int, microbatches: int) -> None:
    lower = size - size % microbatches
    upper = lower + microbatches
    valid = f"{lower} and {upper}" if lower else f"{upper}"
    raise ConfigError(
        f"A batch of {size} samples was to be split into {microbatches} equal microbatches, which "
        f"needs a multiple of {microbatches}. The nearest valid batch sizes: {valid}. If only the "
        "last batch of an epoch is short, set drop_last=True."
    )


def _raise_mismatch(first: tuple[str, int], other: tuple[str, int], microbatches: int) -> None:
    raise ConfigError(
        f"The batch was to be split into {microbatches} microbatches along dimension 0, which all "
        f"its tensors must share: {first[0]} has size {first[1]} there, {other[0]} has size "
        f"{other[1]}. Expand the one that is not per sample (`x.expand({first[1]}, ...)`), wrap "
        "it in an object with an `smp_slice(num_mb, mb, axis)` method, or set microbatches=1."
    )


def _refuse_inside(value: Any, path: str) -> None:
    """Raises for the first value in a batch without a size that could never be split."""
    _refuse_layout(value, path)
    _refuse_packed(value, path)
    _refuse_object(value, path)
    for child in children_of(value) or ():
        _refuse_inside(child.value, f"{path}{child.label}")


def _refuse_layout(value: Any, path: str) -> None:
    if not isinstance(value, Tensor):
        return
    if value.is_nested:
        raise UnsupportedError(
            f"{path} is a nested tensor, which cannot be split into views. Use a padded one "
            "(`torch.nested.to_padded_tensor`), or set microbatches=1."
        )
    if value.layout != torch.strided:
        raise UnsupportedError(
            f"{path} is a sparse tensor ({value.layout}), which cannot be split into views. Use a "
            "dense one (`x.to_dense()`), or set microbatches=1."
        )


def _refuse_packed(value: Any, path: str) -> None:
    if isinstance(value, PackedSequence):
        raise UnsupportedError(
            f"{path} is a PackedSequence, whose samples are interleaved and cannot be split. "
            "Return the padded tensor and its lengths and pack inside the step "
            "(`pack_padded_sequence`), or set microbatches=1."
        )


def _refuse_object(value: Any, path: str) -> None:
    if children_of(value) is None and not is_array(value) and holds_arrays(value):
        raise UnsupportedError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which holds tensors "
            f"but is no container that can be split. To use it, {_FIX}."
        )
