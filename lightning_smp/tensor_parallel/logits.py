"""Logits whose vocabulary is split over a tensor group, as a tensor of the full shape.

To the user's code they are logits [..., V] of this rank's samples; `logits_part` says what each
rank holds. What loss functions do on the way to a cross entropy (casts, views, shifts, scalings,
masks) is done to that part, and the cross entropy is computed in parallel. Every other use brings
together this rank's full logits, with their gradient, and is reported once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.functions import METADATA, function_name
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.tensor_parallel.cross_entropy import Buffer
from lightning_smp.tensor_parallel.logits_functions import FUNCTIONS
from lightning_smp.tensor_parallel.logits_part import Layout, Part, Vocabulary, cut, join

__all__ = ["SplitLogits", "Vocabulary", "split_logits", "whole"]

_ON_GRAPH = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, torch.autograd.grad}
# What is asked of the tensor object; a checkpoint calls backward with gradients of its outputs.
_OF_OBJECT = {torch.autograd.backward, Tensor.backward, Tensor.untyped_storage}


class SplitLogits(Tensor):
    """Logits [..., V] of which this rank holds some columns."""

    _part: Part
    _full: Tensor | None

    @staticmethod
    def __new__(cls, part: Part) -> SplitLogits:
        """A tensor without storage of the full shape."""
        tensor = Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=part.layout.dtype, device=part.local.device
        )
        tensor._part = part
        tensor._full = None
        return tensor

    def __init__(self, part: Part) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__repr__:
            return SplitLogits.__repr__(args[0])
        if func in METADATA or func in _OF_OBJECT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ON_GRAPH:
            raise UnsupportedError(
                f"{function_name(func)} on logits whose vocabulary is split: their gradient is "
                "never made as one tensor. Use it on the hidden states, or on logits.clone()."
            )
        result = _handle(func, args, kwargs)
        if result is not NotImplemented:
            return result
        gathered = _gathered_for(func)
        return func(*map_tensors(args, gathered), **map_tensors(kwargs, gathered))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Something below Python's functions needs the numbers."""
        gathered = _gathered_for(func)
        with torch.no_grad():
            return func(*map_tensors(args, gathered), **map_tensors(kwargs or {}, gathered))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = self._part
        tp = part.layout.vocabulary.tp
        return (
            f"SplitLogits(shape={part.shape}, dtype={part.layout.dtype}, "
            f"{part.local.shape[-1]} classes on rank {tp.rank} of {tp.size})"
        )

    def smp_whole(self) -> Tensor:
        """Return this rank's full logits. Collective over tp the first time."""
        part, full = self._part, self._full
        if full is None or (
            part.local.requires_grad > full.requires_grad <= torch.is_grad_enabled()
        ):
            full = _Numbers.apply(self) if _is_detour(self) else join(part)
            self._full = full
            if part.buffer is not None and part.layout.vocabulary.tp.size == 1:
                part.buffer.readers.count += 1  # nothing was copied: it is the same memory
        return full


def split_logits(local: Tensor, vocabulary: Vocabulary) -> SplitLogits:
    """Return logits as the user sees them, for what a head has computed.

    Args:
        local: [g, ..., V_local], made for this purpose.
        vocabulary: how the classes are split.
    """
    return _wrap(Part(local, Layout(vocabulary, local.dtype, local.dim() - 2), Buffer()))


def whole(tensor: Any) -> Any:
    """Return this rank's full logits for split ones, and anything else as it is.

    Collective over tp the first time for split logits.
    """
    return tensor.smp_whole() if isinstance(tensor, SplitLogits) else tensor


def _is_detour(tensor: SplitLogits) -> bool:
    """Whether gradients must pass through the tensor itself: a reentrant checkpoint made it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad and not tensor._part.local.requires_grad


def _wrap(part: Part) -> SplitLogits:
    logits: SplitLogits = _Attach.apply(part.local, part)
    return logits


class _Attach(torch.autograd.Function):
    """Ties split logits to the graph of their part, for uses that bypass Python's functions."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: Part) -> Any:
        ctx.arguments = part.layout, local.shape[1:-1]
        return SplitLogits(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return cut(gradients[0], *ctx.arguments), None


class _Numbers(torch.autograd.Function):
    """The full logits; their gradient goes back as that of the tensor."""

    @staticmethod
    def forward(ctx: Any, logits: SplitLogits) -> Any:
        return join(logits._part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _gathered_for(func: Any) -> Any:
    def change(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, SplitLogits):
            return tensor
        vocabulary = tensor._part.layout.vocabulary
        vocabulary.report.note(vocabulary.name, func)
        return tensor.smp_whole()

    return change


def _handle(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what can be done to the part; NotImplemented for everything else."""
    handler = FUNCTIONS.get(func)
    if handler is None or not args or not isinstance(args[0], SplitLogits) or _is_detour(args[0]):
        return NotImplemented
    if any(isinstance(t, SplitLogits) for t in iter_tensors((args[1:], kwargs))):
        return NotImplemented
    result = handler(func, args[0]._part, *args[1:], **kwargs)
    return _wrap(result) if isinstance(result, Part) else result
