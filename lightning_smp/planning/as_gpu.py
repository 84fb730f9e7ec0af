"""What a GPU does otherwise than the CPU on which a step is analysed.

Fake tensors must be CPU tensors (partitioning/fakes.py). What is one fused operation on a GPU is
several on a CPU, and autocast chooses other types there, which shows in times and in activations.
This mode calls, for each such function, what looks the same as the GPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["AsGpu"]

_WIDE: Final = frozenset(
    {
        torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__, torch.rsqrt, Tensor.rsqrt,
        torch.exp, Tensor.exp, torch.log, Tensor.log, torch.softmax, Tensor.softmax, F.softmax,
        torch.log_softmax, Tensor.log_softmax, F.log_softmax, F.layer_norm, F.group_norm,
        F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div,
        F.binary_cross_entropy_with_logits, torch.norm, Tensor.norm, torch.cumsum, Tensor.cumsum,
        torch.prod, Tensor.prod, torch.sum, Tensor.sum,
    }
)  # fmt: skip
"""What autocast runs in 32 bits on a GPU."""


class AsGpu(TorchFunctionMode):
    """Runs a step on fake CPU tensors as a GPU would."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fused = _FUSED.get(func)
        if fused is not None:
            return fused(*args, **kwargs)
        if func in _WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (tuple(args), kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _widened(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_narrow else leaf


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel, which keeps a mask of bytes."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Fused also with dropout."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal=is_causal, **options
    )


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """One kernel with the traffic of a layer norm."""
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 1e-6)[0]


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Under autocast the logarithms stay in 16 bits, and are then copied to 32."""
    if target.is_floating_point() or label_smoothing or not torch.is_autocast_enabled("cpu"):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    with torch.autocast("cpu", enabled=False):
        logarithms = torch.log_softmax(input, 1 if input.dim() > 1 else 0).float()
        return F.nll_loss(logarithms, target, weight, size_average, ignore_index, reduce, reduction)


_FUSED: Final[dict[Any, Callable[..., Any]]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
}
