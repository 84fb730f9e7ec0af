"""What Hugging Face's Trainer needs beside the API to run as it did under SageMaker.

There the launcher set none of torchrun's variables, so Accelerate saw one process. Here it must be
told what counts: replicas, not processes. And the ranks of one replica clip by one norm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_smp.process_state import state
from lightning_smp.weights.clip import global_clip

__all__ = ["PATCHES"]

_LAUNCHER: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MARK: Final = "_smp_patched"


def patch_accelerate_state() -> None:
    """Lets Accelerate's state count replicas, once `smp.init` was called."""
    kind = sys.modules["accelerate.state"].PartialState

    def replace(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: N807
            if not state.initialized or kind._shared_state:
                original(self, cpu, **kwargs)
                return
            with _one_process():
                original(self, cpu, **kwargs)
            self.device = state.device
            self.num_processes, self.process_index = _replicas()

        return __init__

    _replace(kind, "__init__", replace)


def patch_accelerator() -> None:
    """Lets Accelerate gather over replicas."""
    kind = sys.modules["accelerate.accelerator"].Accelerator

    def gather(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def over_replicas(self: Any, tensor: Any) -> Any:
            if not state.initialized or _replicas()[0] == 1:
                return original(self, tensor)
            return tree_map_only(Tensor, _gathered, tensor)

        return over_replicas

    def pad(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def to_longest(
            self: Any, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
        ) -> Any:
            if not state.initialized or _replicas()[0] == 1:
                return original(self, tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
            return tree_map_only(Tensor, lambda t: _padded(t, dim, pad_index, pad_first), tensor)

        return to_longest

    _replace(kind, "gather", gather)
    _replace(kind, "pad_across_processes", pad)


def patch_trainer() -> None:
    """Lets the Trainer find the wrapped model again, and clip by the norm over all stages.

    Releases around 5.24 wrap the model, but do not come to make the optimizer from it.
    """
    kind = sys.modules["transformers.trainer"].Trainer

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def known(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            wrapped = state.model
            if wrapped is not None and wrapped.get_module() is model:
                return wrapped
            return original(self, model, *args, **kwargs)

        return known

    def clip(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def over_stages(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _norms_over_stages():
                return original(self, *args, **kwargs)

        return over_stages

    def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def of_an_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None and state.model is not None:
                self.create_optimizer(state.model)
            return original(self, *args, **kwargs)

        return of_an_optimizer

    _replace(kind, "_wrap_model", wrap)
    _replace(kind, "create_scheduler", schedule)
    for name in ("_clip_grad_norm", "_get_grad_norm"):
        if hasattr(kind, name):
            _replace(kind, name, clip)


PATCHES: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "accelerate.state": patch_accelerate_state,
        "accelerate.accelerator": patch_accelerator,
        "transformers.trainer": patch_trainer,
    }
)
"""What to call when a module has been imported."""


def _replace(
    kind: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(kind, name)
    if not hasattr(original, _MARK):
        replacement = make(original)
        setattr(replacement, _MARK, True)
        setattr(kind, name, replacement)


@contextmanager
def _one_process() -> Iterator[None]:
    """Hides the launcher's variables."""
    held = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def _replicas() -> tuple[int, int]:
    """(number of different batches, which of them is this rank's)."""
    groups = state.groups
    assert state.cfg is not None
    if state.cfg.prescaled_batch:
        return groups.rdp_size, groups.rdp_rank
    return groups.dp_size, groups.dp_rank


def _gathered(tensor: Tensor) -> Tensor:
    """The tensors of all replicas, one after the other. Collective over the replicas."""
    assert state.cfg is not None
    group = state.groups.rdp if state.cfg.prescaled_batch else state.groups.dp
    mine = (tensor if tensor.ndim else tensor[None]).contiguous()
    parts = [torch.empty_like(mine) for _ in range(_replicas()[0])]
    torch.distributed.all_gather(parts, mine, group=group)
    return torch.cat(parts)


def _padded(tensor: Tensor, dim: int, pad_index: int, pad_first: bool) -> Tensor:
    """The tensor, as long as the longest of all replicas. Collective over the replicas."""
    if not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    length = torch.tensor([tensor.shape[dim]], device=tensor.device)
    missing = int(_gathered(length).max()) - tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = missing
    filler = tensor.new_full(shape, pad_index)
    return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim)


def _norms_over_stages() -> AbstractContextManager[Any]:
    model = state.model
    if model is None or not state.initialized:
        return nullcontext()
    deployment = model.deployment
    return global_clip(lambda: deployment.ownership, deployment.norm_group)
