"""The values of a part of a deferred tensor, made without making the whole.

Note [Values in pieces]
Most parameters are made by operations that work element by element on contiguous memory: draws,
fills, scaling, conversions. Their elements are made piece by piece, in order; the wanted ones are
kept and each piece is freed. Draws on the CPU take one number of the generator after the other, and
`normal_` works on groups of 16 of which the last may be short: so pieces are multiples of that, and
the last one has at least 16 elements. For each dtype it is measured at its first use that this
gives the numbers of one draw. A part that is taken before there is memory is an operation of its
own, which is replayed in pieces of its operand. Where a tensor was made in another way
(`orthogonal_`, draws into a slice, draws on a GPU), it is made whole and freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_smp.deferred.draws import GROUP, fill_of
from lightning_smp.deferred.record import held_of
from lightning_smp.deferred.tape import Buffer, Operand, Operation, Ref, default_dtype, needed
from lightning_smp.deferred.tensor import real_value

__all__ = ["PIECE", "Part", "part_value", "realized", "take_part"]

PIECE: Final = 1 << 16
"""Elements of a piece."""

_ATEN = torch.ops.aten
_COPIES: Final = {_ATEN.copy_, _ATEN.clone, _ATEN._to_copy, _ATEN.zero_, _ATEN.fill_}
_CONSTANTS: Final = {
    **dict.fromkeys((_ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros), 0),
    **dict.fromkeys((_ATEN.ones, _ATEN.ones_like, _ATEN.new_ones), 1),
}
_FULL: Final = {_ATEN.full, _ATEN.full_like, _ATEN.new_full}  # the value is the last argument


@dataclass(frozen=True)
class Part:
    """Some indices of one dimension.

    Attributes:
        dim: the dimension, from 0.
        ranges: first indices and those after the last, in the order in which they lie in the part.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Returns a copy of the part, in C order."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim).contiguous()

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The part's shape."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])

    def columns(self, whole: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """The part as columns of a matrix with the same memory: its width, and ranges of it."""
        inner = math.prod(whole[self.dim + 1 :])
        return whole[self.dim] * inner, [(a * inner, b * inner) for a, b in self.ranges]


_LIBRARY: Final = torch.library.Library("lightning_smp_deferred", "DEF")
_LIBRARY.define("part(Tensor whole, int dim, int[] bounds) -> Tensor")


def _part_of(whole: Tensor, dim: int, bounds: Sequence[int]) -> Tensor:
    return Part(dim, tuple(zip(bounds[::2], bounds[1::2], strict=True))).of(whole)


_LIBRARY.impl("part", _part_of, "CompositeExplicitAutograd")
_PART: Final = torch.ops.lightning_smp_deferred.part.default


def take_part(tensor: Tensor, part: Part) -> Tensor:
    """Returns a part of a tensor; of a deferred one it is deferred as well."""
    with torch.no_grad():
        taken: Tensor = _PART(tensor.detach(), part.dim, [b for pair in part.ranges for b in pair])
    return taken


def realized(tensor: Tensor) -> Tensor:
    """Returns what a deferred tensor will be; of a part's operand no more is made than needed."""
    held = held_of(tensor)
    assert held is not None
    ref = held.ref()
    operations = ref.buffer.operations
    if len(operations) == 1 and operations[0].func is _PART and ref.covers_buffer():
        whole, dim, bounds = operations[0].args
        part = Part(dim, tuple(zip(bounds[::2], bounds[1::2], strict=True)))
        pieces = _Pieces.of(whole, operations[0].time)
        if pieces is not None:
            return _assembled(pieces, whole, part)
    return real_value(tensor)


def part_value(tensor: Tensor, part: Part) -> Tensor:
    """Returns the values of a part of a deferred tensor, which stays deferred."""
    held = held_of(tensor)
    assert held is not None
    ref = held.ref()
    pieces = _Pieces.of(ref)
    return part.of(realized(tensor)) if pieces is None else _assembled(pieces, ref, part)


def _assembled(pieces: _Pieces, ref: Ref, part: Part) -> Tensor:
    out = torch.empty(part.shape(ref.size), dtype=ref.dtype, device=ref.buffer.device)
    width, columns = part.columns(ref.size)
    kept, count = sum(stop - start for start, stop in columns), math.prod(ref.size)
    end = count - width + max(stop for _, stop in columns)
    for start, stop in _bounds(count):
        places = list(_places(start, stop, width, columns))
        if start >= end:
            break
        if not places:
            pieces.skip(stop - start)
            continue
        piece = pieces.make(start, stop)
        for rows, first, (lo, hi), at in places:
            source = piece[first : first + rows * width] if rows > 1 else piece[first:]
            source = source.view(rows, width)[:, lo:hi] if rows > 1 else source[None, : hi - lo]
            target = out.view(-1, kept)[at // kept :][:rows, at % kept :]
            target[:, : source.shape[1]].copy_(source)
    return out


def _bounds(count: int) -> Iterator[tuple[int, int]]:
    """The pieces of `count` elements: first elements and those after the last."""
    start = 0
    while start < count:
        stop = start + PIECE
        stop = count if count - stop < GROUP else stop
        yield start, stop
        start = stop


def _places(
    start: int, stop: int, width: int, columns: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, tuple[int, int], int]]:
    """What of the elements from `start` to `stop` belongs to columns of a matrix, and where to.

    Yields:
        Number of rows, first element in the piece (of the first row, if there are several, else of
        what is taken), the columns, and the place in the part, which has these columns only.
    """
    kept = sum(hi - lo for lo, hi in columns)
    at = start
    while at < stop:
        row, column = divmod(at, width)
        rows = (stop - at) // width if column == 0 else 0
        end = at + rows * width if rows > 1 else min(stop, (row + 1) * width)
        offset = 0
        for lo, hi in columns:
            if rows > 1:
                yield rows, at - start, (lo, hi), row * kept + offset
            else:
                first, last = max(lo, column), min(hi, column + end - at)
                if first < last:
                    place = row * kept + offset + first - lo
                    yield 1, at - start + first - column, (first, last), place
            offset += hi - lo
        at = end


class _Pieces:
    """Makes a tensor's elements piece by piece, in order."""

    def __init__(self, ref: Ref, operations: Sequence[Operation]) -> None:
        self._ref = ref
        self._operations = operations
        self._generators = {
            operation: torch.Generator().set_state(operation.state)
            for operation in operations
            if operation.state is not None
        }

    @classmethod
    def of(cls, ref: Ref, before: float = math.inf) -> _Pieces | None:
        """None if it cannot be made so; see Note [Values in pieces]."""
        operations = needed([ref.buffer], before)
        count = math.prod(ref.size)
        is_fit = _spans(ref, count) and all(_is_local(one, count) for one in operations)
        return cls(ref, operations) if is_fit else None

    def skip(self, count: int) -> None:
        """Leaves elements out."""
        draws = self._ref.buffer.recording.draws
        for operation, generator in self._generators.items():
            filled = torch.empty(count, dtype=_target(operation).dtype, device="meta")
            skipped = draws.skip(operation.func, filled, generator)
            assert skipped, "works in pieces, so it can be left out"

    def make(self, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop`."""
        made: dict[Buffer, Tensor] = {}
        with torch.no_grad(), torch.inference_mode(mode=False), _disable_current_modes():
            for operation in self._operations:
                self._execute(operation, start, stop, made)
            return _piece(self._ref, start, stop, made)

    def _execute(
        self, operation: Operation, start: int, stop: int, made: dict[Buffer, Tensor]
    ) -> None:
        packet = operation.func._overloadpacket
        fill = fill_of(operation.func)
        target = _target(operation)
        if fill is not None:
            into = _piece(target, start, stop, made)
            numbers = operation.args[1:] if operation.func._schema.is_mutable else ()
            fill(into, self._generators[operation], *numbers)
        elif packet in _CONSTANTS or packet in _FULL:
            value = _CONSTANTS.get(packet, operation.args[-1])
            _piece(target, start, stop, made).fill_(value)
        elif not _is_empty(target, start, stop):
            real = partial(_real, start=start, stop=stop, made=made)
            args, kwargs = tree_map(real, (operation.args, operation.kwargs))
            with default_dtype(operation.default_dtype):
                result = operation.func(*args, **kwargs)
            for _, ref in operation.results:
                made[ref.buffer] = result


def _target(operation: Operation) -> Ref:
    """What an operation makes or writes."""
    ref: Ref = operation.results[0][1] if operation.results else operation.args[0]
    return ref


def _is_local(operation: Operation, count: int) -> bool:
    """Whether an operation works element by element on memory of `count` elements."""
    leaves = tree_leaves((operation.args, operation.kwargs))
    refs = [leaf for leaf in leaves if isinstance(leaf, Ref)]
    refs += [ref for _, ref in operation.results]
    if not refs or len(operation.results) > 1 or operation.device.type != "cpu":
        return False
    if not operation.results and not isinstance(operation.args[0], Ref):
        return False
    target = _target(operation)
    fill = fill_of(operation.func)
    packet = operation.func._overloadpacket
    if fill is not None:
        draws = target.buffer.recording.draws
        has_numbers = all(isinstance(leaf, (Ref, int, float)) for leaf in operation.args[1:])
        is_known = has_numbers and not operation.kwargs
        is_known |= not operation.func._schema.is_mutable  # a factory; the rest is a size
        return is_known and _spans(target, count) and draws.works_in_pieces(fill, target.dtype)
    if packet in _CONSTANTS or packet in _FULL:
        return _spans(target, count)
    is_pointwise = torch.Tag.pointwise in operation.func.tags or packet in _COPIES
    if not is_pointwise or operation.state is not None:
        return False
    operands = [leaf for leaf in leaves if isinstance(leaf, Operand)]
    if all(_spans(ref, count) for ref in refs):
        return all(_is_aligned(one.tensor, count) for one in operands)
    alone = len(refs) == 1 and not operation.results and not operation.kwargs
    numbers = all(one.tensor.dim() == 0 for one in operands)
    return alone and numbers and _is_stretch(target, count)


def _spans(ref: Ref, count: int) -> bool:
    """Whether a ref is all of a buffer of `count` elements on the CPU, in C order."""
    return _is_stretch(ref, count) and math.prod(ref.size) == count


def _is_stretch(ref: Ref, count: int) -> bool:
    """Whether a ref is consecutive elements, in C order, of such a buffer."""
    is_fit = ref.buffer.num_bytes == count * ref.dtype.itemsize
    in_order = torch.empty_strided(ref.size, ref.stride, device="meta").is_contiguous()
    return is_fit and in_order and ref.buffer.device.type == "cpu"


def _is_aligned(tensor: Tensor, count: int) -> bool:
    on_host = tensor.device.type == "cpu"
    return on_host and (tensor.dim() == 0 or (tensor.numel() == count and tensor.is_contiguous()))


def _is_empty(ref: Ref, start: int, stop: int) -> bool:
    return ref.offset >= stop or ref.offset + math.prod(ref.size) <= start


def _piece(ref: Ref, start: int, stop: int, made: dict[Buffer, Tensor]) -> Tensor:
    """The elements of a ref from `start` to `stop` of its buffer."""
    if ref.buffer not in made:
        made[ref.buffer] = torch.empty(stop - start, dtype=ref.dtype, device="cpu")
    first = max(0, ref.offset - start)
    last = min(stop, ref.offset + math.prod(ref.size)) - start
    return made[ref.buffer].view(ref.dtype)[first:last]


def _real(leaf: Any, start: int, stop: int, made: dict[Buffer, Tensor]) -> Any:
    if isinstance(leaf, Ref):
        return _piece(leaf, start, stop, made)
    if isinstance(leaf, Operand):
        value = leaf.value()
        return value if value.dim() == 0 else value.view(-1)[start:stop]
    return leaf
