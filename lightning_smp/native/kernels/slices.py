"""Packing for the exchange between tensor-parallel ranks: one contiguous slice a rank, and back.

Cutting [B, S, H] along its last dim leaves slices with gaps; what is sent must have none. `pack`
moves all slices into one buffer, one after another, and converts on the way; `unpack` is its
inverse. Slices may differ in size (a hidden size that the ranks do not divide). Both are
differentiable, each the backward of the other.

There is no operator for unpacking without a conversion: torch's `cat` is as fast as a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels.library import declare, differentiate, prepare

__all__ = ["pack", "slice_views", "unpack"]


def pack(
    whole: Tensor, sizes: Sequence[int], *, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Moves the slices of a tensor into one buffer.

    Args:
        whole: any shape, such as [B, S, H].
        sizes: each slice's length along `dim`; together all of it.
        dim: where to cut.
        dtype: of the result; that of `whole` by default.

    Returns:
        Flat, with as many elements as `whole`: slice r as it is when contiguous, after those before
        it; see `slice_views`.

    Raises:
        UnsupportedError: the sizes are not those of the dim.
    """
    rows, columns = _as_matrix(whole.shape, sizes, dim)
    to = dtype or whole.dtype
    if not _is_converted(whole.dtype, to):
        whole = whole.to(to)
    prepare(whole)
    packed: Tensor = _pack(whole.reshape(rows, sum(columns)).contiguous(), columns, to)
    return packed


def unpack(
    packed: Tensor,
    shape: Sequence[int],
    sizes: Sequence[int],
    *,
    dim: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Puts packed slices together again.

    Args:
        packed: as `pack` returns it.
        shape: of the whole.
        sizes: each slice's length along `dim`; together all of it.
        dim: where it was cut.
        dtype: of the result; that of `packed` by default.

    Raises:
        UnsupportedError: the sizes are not those of the dim, or the buffer has another size.
    """
    rows, columns = _as_matrix(shape, sizes, dim)
    if packed.numel() != rows * sum(columns):
        raise UnsupportedError(
            f"A buffer of {packed.numel()} elements was to be unpacked as {list(shape)}."
        )
    to = dtype or packed.dtype
    if not _is_converted(packed.dtype, to):
        return torch.cat(slice_views(packed.reshape(-1), shape, sizes, dim=dim), dim).to(to)
    prepare(packed)
    whole: Tensor = _unpack(packed.reshape(-1).contiguous(), rows, columns, to)
    return whole.view(*shape)


def slice_views(
    packed: Tensor, shape: Sequence[int], sizes: Sequence[int], *, dim: int
) -> list[Tensor]:
    """Views of the slices in a packed buffer: what goes to, or came from, each rank.

    Args:
        packed: as `pack` returns it.
        shape: of the whole.
        sizes: each slice's length along `dim`; together all of it.
        dim: where it was cut.
    """
    rows, columns = _as_matrix(shape, sizes, dim)
    dim = dim % len(shape)
    parts = packed.split([rows * count for count in columns])
    shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    return [part.view(of) for part, of in zip(parts, shapes, strict=True)]


def _as_matrix(shape: Sequence[int], sizes: Sequence[int], dim: int) -> tuple[int, list[int]]:
    """Returns rows of the whole, and columns of each slice, as if it were cut along columns."""
    if not -len(shape) <= dim < len(shape) or sum(sizes) != shape[dim] or min(sizes) < 0:
        raise UnsupportedError(
            f"Slices of {list(sizes)} along dim {dim} do not make up a tensor of {list(shape)}."
        )
    dim = dim % len(shape)
    inner = math.prod(shape[dim + 1 :])
    return math.prod(shape[:dim]), [size * inner for size in sizes]


def _is_converted(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the operators convert between these types; torch does it beforehand otherwise."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    return source != target and source in types and target in types


def _reference_pack(whole: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    packed = _fake_pack(whole, sizes, dtype)
    parts = packed.split([whole.shape[0] * size for size in sizes])
    for part, columns in zip(parts, whole.split(sizes, dim=1), strict=True):
        part.view(columns.shape).copy_(columns)
    return packed


def _fake_pack(whole: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    return whole.new_empty(whole.shape[0] * whole.shape[1], dtype=dtype)


def _reference_unpack(packed: Tensor, rows: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    parts = packed.split([rows * size for size in sizes])
    shaped = [part.view(rows, size) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(shaped, 1).to(dtype)


def _fake_unpack(packed: Tensor, rows: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty((rows, sum(sizes)), dtype=dtype)


def _remember_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    whole, ctx.sizes, _ = inputs
    ctx.shape, ctx.dtype = whole.shape, whole.dtype


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return unpack(grad, ctx.shape, ctx.sizes, dim=1, dtype=ctx.dtype), None, None


def _remember_unpack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    packed, _, ctx.sizes, _ = inputs
    ctx.dtype = packed.dtype


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return pack(grad, ctx.sizes, dim=1, dtype=ctx.dtype), None, None, None


_pack = declare(
    "pack_slices(Tensor whole, int[] sizes, ScalarType dtype) -> Tensor",
    _reference_pack,
    _fake_pack,
)
_unpack = declare(
    "unpack_slices(Tensor packed, SymInt rows, int[] sizes, ScalarType dtype) -> Tensor",
    _reference_unpack,
    _fake_unpack,
)
differentiate("pack_slices", _remember_pack, _pack_backward)
differentiate("unpack_slices", _remember_unpack, _unpack_backward)
