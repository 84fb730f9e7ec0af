"""What loss functions do to logits on the way to a cross entropy, done to a rank's part of them.

Each handler takes the torch function, the part and the call's other arguments. It returns a part, a
tensor, or NotImplemented where the whole logits are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_smp.tensor_parallel.cross_entropy import Loss, cross_entropy
from lightning_smp.tensor_parallel.logits_part import Part

__all__ = ["FUNCTIONS"]

T = Tensor


def _cross_entropy(
    func: Any,
    part: Part,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    shape, layout = part.shape, part.layout
    class_dim = 0 if len(shape) == 1 else 1
    is_parallel = (
        size_average is None
        and reduce is None
        and layout.class_dim == class_dim
        and not target.is_floating_point()
        and target.shape == (*shape[:class_dim], *shape[class_dim + 1 :])
        and not (weight is not None and label_smoothing > 0)
    )
    if not is_parallel:
        return NotImplemented
    local = part.local.reshape(part.local.shape[0], -1, part.local.shape[-1])
    loss = Loss(weight, ignore_index, reduction, label_smoothing)
    vocabulary = layout.vocabulary
    result = cross_entropy(
        local, target, loss, vocabulary.tp, vocabulary.sizes,
        rows=layout.rows, buffer=part.buffer,
    )  # fmt: skip
    if reduction == "none":
        result = result.view(target.shape)
    return result.to(_loss_dtype(part))


def _loss_dtype(part: Part) -> torch.dtype:
    """Autocast computes losses in float32; otherwise a loss has the dtype of its logits."""
    device = part.local.device.type
    dtype = part.layout.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        return torch.float32
    return dtype


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def handler(func: Any, part: Part) -> Part:
        return part.same_memory(part.local, dtype=dtype)

    return handler


def _to(func: Any, part: Part, *args: Any, **kwargs: Any) -> Any:
    """Casts; moves to another device, and copies, need the whole."""
    stub = torch.empty(0, dtype=part.layout.dtype, device=part.local.device)
    moved = stub.to(*args, **kwargs)
    if moved.device != stub.device or kwargs.get("copy") or True in args:
        return NotImplemented
    return part.same_memory(part.local, dtype=moved.dtype)


def _as_type(func: Any, part: Part, other: Tensor) -> Any:
    return _to(func, part, other.dtype)


def _itself(func: Any, part: Part, **kwargs: Any) -> Part:
    return part.same_memory(part.local)


def _detach(func: Any, part: Part) -> Part:
    return part.same_memory(part.local.detach())


def _reshape(func: Any, part: Part, *args: Any, **kwargs: Any) -> Any:
    """Views that leave the vocabulary the last dimension: rows keep their order."""
    wanted = func(torch.empty(part.shape, device="meta"), *args, **kwargs).shape
    if wanted == part.shape:
        return part.same_memory(part.local)
    if not part.is_plain or not wanted or wanted[-1] != part.shape[-1]:
        return NotImplemented
    local = part.local.reshape(part.local.shape[0], *wanted[:-1], part.local.shape[-1])
    return part.same_memory(local, class_dim=len(wanted) - 1)


def _permute(func: Any, part: Part, *args: Any, **kwargs: Any) -> Any:
    if part.layout.rows is not None:
        return NotImplemented
    # The order is read off the strides of a tensor whose strides all differ.
    rank = len(part.shape)
    stub = torch.empty((2,) * rank, device="meta")
    order = [rank - 1 - stride.bit_length() + 1 for stride in func(stub, *args, **kwargs).stride()]
    old = part.layout.class_dim
    lead = [dim for dim in range(rank) if dim != old]
    places = [1 + lead.index(dim) for dim in order if dim != old]
    return part.same_memory(part.local.permute(0, *places, rank), class_dim=order.index(old))


def _index(func: Any, part: Part, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    rank = part.local.dim() - 1
    if not part.is_plain or any(isinstance(item, (list, range)) for item in items):
        return NotImplemented
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        missing = rank - sum(map(_dims_used, items))
        items[at : at + 1] = [slice(None)] * missing
    used = sum(map(_dims_used, items))
    if used == rank and items[-1] != slice(None):
        return NotImplemented
    if any(isinstance(item, Tensor) and item.dim() > 0 for item in items):
        return _choose_rows(part, items)
    local = part.local[(slice(None), *items)]
    return part.same_memory(local, class_dim=local.dim() - 2)


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 1


def _choose_rows(part: Part, items: list[Any]) -> Any:
    """A mask over rows. Ranks with samples of their own remember it, as each has another."""
    mask = items[0]
    lead = part.local.shape[1:-1]
    others = [item for item in items[1:] if item != slice(None)]
    if others or not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != lead:
        return NotImplemented
    rows = mask.reshape(-1).nonzero()[:, 0]
    if part.layout.vocabulary.tp.gathers:
        return part.same_memory(part.local, rows=rows, class_dim=1)
    chosen = part.local.flatten(1, -2).index_select(1, rows)
    return part.new_memory(chosen, is_saved=False).same_memory(
        chosen, class_dim=1, dtype=part.layout.dtype
    )


def _scale(func: Any, part: Part, number: Any, **kwargs: Any) -> Any:
    """Multiplies or divides every logit by one number."""
    is_number = isinstance(number, (int, float)) or (
        isinstance(number, Tensor) and number.dim() == 0 and not number.requires_grad
    )
    if not is_number or kwargs:
        return NotImplemented
    return part.new_memory(func(part.local.to(part.layout.dtype), number), is_saved=False)


def _saturate(func: Any, part: Part) -> Part:
    return part.new_memory(func(part.local.to(part.layout.dtype)), is_saved=True)


FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    F.cross_entropy: _cross_entropy,
    T.float: _cast(torch.float32),
    T.double: _cast(torch.float64),
    T.half: _cast(torch.float16),
    T.bfloat16: _cast(torch.bfloat16),
    T.to: _to,
    T.type_as: _as_type,
    T.contiguous: _itself,
    T.detach: _detach,
    torch.detach: _detach,
    **dict.fromkeys(
        (T.view, T.reshape, torch.reshape, T.flatten, torch.flatten, T.unflatten, torch.unflatten,
         T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze), _reshape,
    ),
    **dict.fromkeys(
        (T.transpose, torch.transpose, T.permute, torch.permute, T.swapaxes, torch.swapaxes,
         T.swapdims, torch.swapdims, T.movedim, torch.movedim, T.moveaxis, torch.moveaxis,
         T.mT.__get__), _permute,  # type: ignore[attr-defined]
    ),
    T.__getitem__: _index,
    **dict.fromkeys(
        (T.mul, torch.mul, T.__mul__, T.__rmul__, T.div, torch.div, T.__truediv__,
         T.true_divide, torch.true_divide), _scale,
    ),
    T.tanh: _saturate,
    torch.tanh: _saturate,
}  # fmt: skip
"""Function -> handler."""
