"""Attention masks that some ranks of a tensor group leave out and others do not.

A model leaves its mask out where a batch has no padding. Where every rank has samples of its own,
some may have padding and others not, but all must bring a mask together, or none. So blocks of a
model that was called with a mask always have one.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_smp.placed.structure import iter_tensors
from lightning_smp.tensor_parallel.context import TensorParallel

__all__ = ["MaskWatch"]

_NAMES: Final = ("attention_mask", "mask", "encoder_attention_mask", "decoder_attention_mask")
_KEYS: Final = ("encoder_hidden_states", "key_value_states")


class MaskWatch:
    """Whether a model is called with masks; a hook of the model, shared with its blocks.

    Attributes:
        tp: the tensor group.
        has_masks: whether a call has come with a mask. It stays, so that recomputation under
            activation checkpointing sees what the forward saw.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self.has_masks = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the model's forward."""
        self.has_masks |= any(isinstance(kwargs.get(name), Tensor) for name in _NAMES)

    def complete(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a block's keyword arguments with the mask that the model left out."""
        name = next((n for n in _NAMES if n in kwargs and kwargs[n] is None), None)
        is_known = hasattr(module, "is_causal") and hasattr(module, "config")
        if not self.has_masks or not self.tp.gathers or name is None or not is_known:
            return kwargs
        if any(isinstance(kwargs.get(n), Tensor) for n in _NAMES):
            return kwargs
        hidden = next(iter_tensors((args, kwargs)))
        keys = next((kwargs[n] for n in _KEYS if kwargs.get(n) is not None), hidden)
        return {**kwargs, name: _without_padding(module, hidden, keys)}


def _without_padding(module: nn.Module, hidden: Tensor, keys: Tensor) -> Tensor:
    """A mask that hides nothing but, in causal attention, the future.

    Returns:
        [B, S_keys] for flash attention, otherwise [B, 1, S, S_keys]: additive for eager attention.
    """
    implementation = getattr(module.config, "_attn_implementation", "")
    if "flash" in implementation:
        return torch.ones(keys.shape[:2], dtype=torch.long, device=hidden.device)
    shape = (hidden.shape[0], 1, hidden.shape[1], keys.shape[1])
    seen = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    if module.is_causal and keys is hidden:
        seen = seen.tril()
    if implementation != "eager":
        return seen
    lowest = torch.finfo(hidden.dtype).min
    return torch.zeros(shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~seen, lowest)
