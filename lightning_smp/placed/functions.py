"""Which torch functions are answered from the spec, read by Python, or change an operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "BACKWARD",
    "CHANGES_STATE",
    "DYNAMIC",
    "MASKED",
    "METADATA",
    "ON_PARAMETERS",
    "READS",
    "REFUSED",
    "function_name",
    "mutates_first",
    "read_everywhere",
]

T = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(T, name).__get__ for name in names if hasattr(T, name)}


def _methods(*names: str) -> set[Any]:
    return {getattr(T, name) for name in names if hasattr(T, name)}


METADATA: frozenset[Any] = frozenset(
    _getters(
        "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_cuda", "is_cpu",
        "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mkldnn", "is_mps", "is_xpu",
        "is_leaf", "grad_fn", "itemsize", "nbytes", "names", "output_nr", "retains_grad",
        "is_sparse_csr", "is_vulkan", "is_xla", "_version",
    )
    | _methods(
        "size", "dim", "numel", "nelement", "ndimension", "element_size", "stride",
        "is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__", "__hash__",
        "get_device", "is_inference", "is_conj", "is_neg", "is_pinned", "__repr__", "has_names",
        "is_same_size", "dim_order",
    )
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_inference,
       torch.is_same_size, torch.is_conj, torch.is_neg}
)  # fmt: skip
"""Questions about a tensor that its spec answers on every rank alike."""


def read_everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers without its graph: what a metric or a log takes."""
    return tensor.detach()


READS: frozenset[Any] = frozenset(
    _methods(
        "item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "tolist", "numpy",
        "__array__", "equal", "allclose", "is_nonzero", "__contains__", "__format__", "__iter__",
    )
    | {torch.equal, torch.allclose, torch.is_nonzero, torch.tensor, torch.as_tensor,
       torch.asarray, T.new_tensor, read_everywhere}
) - {T.__iter__}  # fmt: skip
"""Python needs the numbers: the operands go to every rank, and every rank computes the answer."""

DYNAMIC: frozenset[Any] = frozenset(
    {torch.nonzero, torch.unique, torch.unique_consecutive, torch.masked_select, torch.bincount,
     torch.repeat_interleave, torch.combinations}
    | _methods("nonzero", "unique", "unique_consecutive", "masked_select", "bincount",
               "repeat_interleave")
)  # fmt: skip
"""The shape of the result depends on data, so that no rank but the home can know it."""

MASKED: frozenset[Any] = frozenset(
    {T.__getitem__, torch.masked_select, T.masked_select, torch.repeat_interleave,
     T.repeat_interleave}
)  # fmt: skip
"""Functions whose result's shape depends on how many elements of a plain operand are set."""

ON_PARAMETERS: frozenset[Any] = frozenset(
    {T.requires_grad.__set__, T.requires_grad_, T.grad.__get__, T.grad.__set__, T.grad.__delete__,
     T.register_hook, T.register_post_accumulate_grad_hook, T.retain_grad,
     T.untyped_storage, T.data_ptr}  # type: ignore[attr-defined]
)  # fmt: skip
"""What is done to a parameter object itself, on every rank alike."""

CHANGES_STATE: frozenset[Any] = frozenset({T.requires_grad.__set__, T.requires_grad_})  # type: ignore[attr-defined]
"""Functions on a parameter after which its units' tokens are others."""

BACKWARD: frozenset[Any] = frozenset({T.backward})

REFUSED: dict[Any, str] = {
    T.data_ptr: "there is no storage on the other ranks",
    T.untyped_storage: "there is no storage on the other ranks",
    T.storage: "there is no storage on the other ranks",
    T.as_strided: "strides of a copy on another rank differ",
    torch.as_strided: "strides of a copy on another rank differ",
    T.set_: "the storage of one rank would be replaced",
    T.share_memory_: "there is no storage on the other ranks",
    T.register_post_accumulate_grad_hook: "the hook would run on one rank only",
    T.retain_grad: ".grad of an intermediate tensor would exist on one rank only",
    T.__dlpack__: "there is no storage on the other ranks",
    T.pin_memory: "placed tensors are on the run's device",
}
"""Functions that cannot mean the same on every rank, with the reason."""

_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
                 "lshift", "rshift", "div")
) | {"__setitem__"}  # fmt: skip


def function_name(func: Callable[..., Any]) -> str:
    """A name for errors and fingerprints, equal on all ranks."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', '?')}.{name}"
    module = getattr(func, "__module__", None) or getattr(func, "__objclass__", type).__name__
    return f"{module}.{getattr(func, '__qualname__', name)}"


def mutates_first(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether the function changes its first operand in place, by torch's naming rule."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name in _IN_PLACE_OPERATORS or name == "__set__"
    return name.endswith("_") or kwargs.get("inplace") is True
