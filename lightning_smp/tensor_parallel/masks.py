"""Attention masks that are used whether they hide something or not.

A model of Hugging Face leaves its attention mask out where a batch has no padding. Where every rank
of a tensor group has samples of its own, some may have padding and others not, and then they would
not do the same: one brings its mask together with the others', one does not. So the masks that such
a model is called with answer "no" to the question whether all of their elements are set.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["UsedMask", "use_masks"]

_NAMES: Final = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
_KEEPING: Final = {
    *(Tensor.to, Tensor.type, Tensor.bool, Tensor.int, Tensor.long),
    *(Tensor.view, Tensor.reshape, Tensor.expand, Tensor.contiguous, Tensor.clone, Tensor.detach),
    Tensor.__getitem__,
}


class UsedMask(Tensor):
    """A mask [B, S] of tokens; as booleans it never says of itself that all tokens are set."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            asks = len(args) == 1 and isinstance(args[0], UsedMask) and not kwargs
            if asks and args[0].dtype == torch.bool:
                if func is Tensor.all:
                    return torch.zeros_like(result)
                if func is Tensor.sum:  # compared with the number of elements
                    return result.clamp(max=args[0].numel() - 1)
            if func in _KEEPING and isinstance(result, Tensor) and result.dim() == 2:
                return result.as_subclass(cls)
        return result


def use_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before the forward of a model: its masks [B, S] become such."""
    names = list(inspect.signature(module.forward).parameters)
    named = zip([*names, *[""] * len(args)], args, strict=False)
    positional = tuple(_used(name, value) for name, value in named)
    return positional, {name: _used(name, value) for name, value in kwargs.items()}


def _used(name: str, value: Any) -> Any:
    if name not in _NAMES or type(value) is not Tensor or value.dim() != 2:
        return value
    return value if isinstance(value, FakeTensor) else value.as_subclass(UsedMask)
