"""From one aten operation to the kernel that a GPU runs for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_smp.partitioning.device import Kernel, Kind
from lightning_smp.partitioning.grouped import GROUPED, grouped_flops
from lightning_smp.tensor_parallel.operations import COLLECTIVES, communicated_bytes

__all__ = ["kernel_of", "nbytes", "storage_key", "tensors_in"]

_ATEN = torch.ops.aten
_GATHERS = frozenset({_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather})
# A fake step runs on the CPU, whose attention torch does not count; the formula is the same.
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
_UNINITIALISED = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty})
_JOINS = frozenset({_ATEN.cat, _ATEN.stack})
_PADDED = frozenset({_ATEN.slice_backward, _ATEN.select_backward})
_NORM_BACKWARDS = frozenset({_ATEN.native_layer_norm_backward, _ATEN.native_group_norm_backward,
                             _ATEN.native_batch_norm_backward})  # fmt: skip
_ROWS = _NORM_BACKWARDS | {
    _ATEN.native_layer_norm, _ATEN.native_group_norm, _ATEN.native_batch_norm,
    _ATEN._softmax, _ATEN._log_softmax, _ATEN._softmax_backward_data,
    _ATEN._log_softmax_backward_data, _ATEN._safe_softmax,
    _ATEN.sum, _ATEN.mean, _ATEN.var, _ATEN.var_mean, _ATEN.std, _ATEN.amax, _ATEN.amin,
    _ATEN.max, _ATEN.min, _ATEN.argmax, _ATEN.cumsum, _ATEN.linalg_vector_norm, _ATEN.logsumexp,
}  # fmt: skip
_ALIGNED_ELEMENTS = 8  # 16 bytes


def kernel_of(func: Any, args: Any, kwargs: Any, out: Any) -> Kernel | None:
    """Return what a GPU runs for an operation; None if it computes and moves nothing.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        out: its result.
    """
    if func.namespace == COLLECTIVES:
        return Kernel("link", moved=communicated_bytes(func, args, out))
    packet = func._overloadpacket
    operands, results = tensors_in((args, kwargs)), tensors_in(out)
    if packet in _ATTENTION:
        return _attention(packet, args, kwargs, out, operands + results)
    if packet in flop_registry or packet is GROUPED:
        return _product(packet, args, kwargs, out, operands, results)
    if _is_free(func, operands, results):
        return None
    moved = _moved_bytes(packet, operands, results)
    if packet in _ROWS:
        return Kernel("rows", moved=moved)
    return Kernel("stream", moved=moved, elements=_single_elements(packet, args, operands, results))


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes, whether or not it has storage."""
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """Return what views of one storage share while it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_free(func: Any, operands: list[Tensor], results: list[Tensor]) -> bool:
    """True for views and bookkeeping."""
    is_arithmetic = func.namespace in ("aten", "prims")
    if not is_arithmetic or func.is_view or func._overloadpacket in _UNINITIALISED:
        return True
    if func._schema.is_mutable or not results:
        return not results
    held = {storage_key(tensor) for tensor in operands}
    return all(storage_key(tensor) in held for tensor in results)


def _attention(packet: Any, args: Any, kwargs: Any, out: Any, touched: list[Tensor]) -> Kernel:
    """Half of the square where it is causal, as fused kernels do."""
    counted = _ATTENTION[packet]
    is_backward = counted is _ATEN._scaled_dot_product_flash_attention_backward
    query = args[1 if is_backward else 0]
    flops = float(flop_registry[counted](*args, **kwargs, out_val=out))
    causal = args[7] if is_backward and len(args) > 7 else kwargs.get("is_causal", False)
    if not is_backward and len(args) > 4:
        causal = args[4]
    kind: Kind = "attention_backward" if is_backward else "attention"
    return Kernel(
        kind, flops=flops / 2 if causal else flops, moved=float(sum(map(nbytes, touched))),
        is_16_bit=query.element_size() == 2, head=query.shape[-1],
    )  # fmt: skip


def _product(
    packet: Any, args: Any, kwargs: Any, out: Any, operands: list[Tensor], results: list[Tensor]
) -> Kernel:
    is_16_bit = results[0].element_size() == 2
    touched = operands + results
    is_aligned = not is_16_bit or all(map(_is_aligned, touched))
    count = grouped_flops if packet is GROUPED else flop_registry[packet]
    return Kernel(
        "product" if is_aligned else "unaligned",
        flops=float(count(*args, **kwargs, out_val=out)),
        moved=float(sum(map(nbytes, touched))),
        is_16_bit=is_16_bit,
    )


def _is_aligned(tensor: Tensor) -> bool:
    """Whether each row of a matrix begins at a multiple of 16 bytes when it is multiplied.

    What has elements neither in rows nor in columns (it was expanded) is copied into rows first.
    """
    if tensor.dim() != 2:
        return True
    step, (rows, columns) = max(tensor.stride()), tensor.shape
    if min(tensor.stride()) != 1 or step < min(rows, columns):
        step = columns
    return step % _ALIGNED_ELEMENTS == 0 or min(rows, columns) == 1


def _moved_bytes(packet: Any, operands: list[Tensor], results: list[Tensor]) -> float:
    written = float(sum(map(nbytes, results)))
    if packet in _GATHERS:  # reads what it writes, not the whole table
        return 2 * written
    if packet is _ATEN.nll_loss_forward:  # one element a row
        return written
    if packet is _ATEN.nll_loss_backward:  # zeros, and one element a row
        return written
    read = float(sum(map(nbytes, operands)))
    if packet in _PADDED:  # zeros, and then a copy
        return written + 2 * read
    if packet in _NORM_BACKWARDS:  # the weights' gradients read all again
        return written + 2 * read
    return written + read


def _single_elements(
    packet: Any, args: Any, operands: list[Tensor], results: list[Tensor]
) -> float:
    """How many elements move one at a time, because types, shapes or orders differ."""
    out = results[0]
    if packet in _JOINS:
        dim = args[1] if len(args) > 1 else 0
        return 0.0 if dim == 0 and all(t.is_contiguous() for t in operands) else float(out.numel())
    if packet is _ATEN.embedding_dense_backward:
        return float(out.numel())
    if packet in _PADDED:
        return float(operands[0].numel())
    if packet in _GATHERS:
        return 0.0
    whole = [t for t in operands if t.shape == out.shape]
    is_narrowing = len(whole) == 1 and whole[0].element_size() > out.element_size()
    sizes = {t.element_size() for t in (*whole, out) if t.dtype is not torch.bool}
    is_broadcast = any(1 < t.numel() < out.numel() for t in operands)
    is_ordered = len({_order(t) for t in (*whole, out)}) == 1 and all(map(_is_dense, whole))
    if is_ordered and not is_broadcast and (len(sizes) < 2 or is_narrowing):
        return 0.0
    return float(out.numel())


def _order(tensor: Tensor) -> tuple[int, ...]:
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order of dimensions."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return span == math.prod(tensor.shape)
