"""Many tensors and one flat buffer: copying between them, scaled and converted on the way.

A bucket of gradients becomes one message this way. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels.library import declare, prepare

__all__ = ["flatten_into", "unflatten_into"]


def flatten_into(flat: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """Writes ``scale * tensor`` of each tensor into the flat buffer, one after another.

    Args:
        flat: contiguous, of a floating type, with as many elements as all tensors together.
        tensors: of one floating type, which may be another than that of `flat`; on its device.
            Those with gaps are taken in the order of their indices.
        scale: applied in float32 at least, before rounding to the type of `flat`. 0 writes zeros
            whatever the tensors hold, so that NaN does not spread.

    Raises:
        UnsupportedError: sizes or types do not fit (the CUDA kernel: RuntimeError).
    """
    prepare(flat)
    with torch.no_grad():
        _flatten_into_(flat, tensors, scale)
    torch.autograd.graph.increment_version(flat)


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """Writes ``scale *`` each stretch of the flat buffer into its tensor: undoes `flatten_into`.

    Args:
        flat: as `flatten_into` left it.
        tensors: to be overwritten.
        scale: see `flatten_into`.

    Raises:
        UnsupportedError: sizes or types do not fit (the CUDA kernel: RuntimeError).
    """
    prepare(flat)
    with torch.no_grad():
        _unflatten_into_(flat, tensors, scale)
    torch.autograd.graph.increment_version(tensors)


def _check(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    total = sum(tensor.numel() for tensor in tensors)
    if not flat.is_contiguous() or flat.numel() != total:
        raise UnsupportedError(
            f"Tensors of {total} elements need a contiguous flat buffer of that size; met "
            f"{list(flat.shape)} with strides {list(flat.stride())}."
        )
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1 or not all(dtype.is_floating_point for dtype in (*types, flat.dtype)):
        raise UnsupportedError(
            f"A bucket holds tensors of one floating type; met {sorted(map(str, types))}. Use a "
            f"bucket for each type."
        )
    if torch.float64 in {*types, flat.dtype} and types != {flat.dtype}:
        raise UnsupportedError("A bucket of float64 is not converted from or to another type.")


def _reference_flatten_into_(flat: Tensor, tensors: list[Tensor], scale: float) -> None:
    _check(flat, tensors)
    parts = flat.view(-1).split([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        _copy_scaled(tensor.reshape(-1), part, scale)


def _reference_unflatten_into_(flat: Tensor, tensors: list[Tensor], scale: float) -> None:
    _check(flat, tensors)
    parts = flat.view(-1).split([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        _copy_scaled(part.view(tensor.shape), tensor, scale)


def _copy_scaled(source: Tensor, target: Tensor, scale: float) -> None:
    if scale == 0.0:
        target.zero_()
    elif scale == 1.0:
        target.copy_(source)
    else:
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * scale)


def _fake(*_: Any) -> None:
    return None


_flatten_into_ = declare(
    "flatten_into_(Tensor(a!) flat, Tensor[] tensors, float scale) -> ()",
    _reference_flatten_into_,
    _fake,
)
_unflatten_into_ = declare(
    "unflatten_into_(Tensor flat, Tensor(a!)[] tensors, float scale) -> ()",
    _reference_unflatten_into_,
    _fake,
)
