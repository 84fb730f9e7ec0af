"""Contexts in which scripts and LightningModules build large models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_smp.deferred import default_dtype, deferring
from lightning_smp.errors import ConfigError
from lightning_smp.tensor_parallel.marks import tensor_parallelism as mark_modules

__all__ = ["delay_param_initialization", "model_creation"]


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Builds a model without memory for its tensors; weights are as if it had been built without.

    What initialises a parameter is recorded with the random state that it starts from, and the
    generators go on as if it had been done. When the model is placed (at the first step; with one
    stage when it is wrapped, or when the Trainer starts), each rank does it for what it owns, one
    tensor at a time, straight onto its device. Values that Python asks for meanwhile (`item()`,
    `tolist()`) are made for it and freed. State dicts may be loaded before that.

    Args:
        enabled: False does nothing, so that a script's option can be passed on.
    """
    if not enabled:
        yield
        return
    with deferring():
        yield


@contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Builds a model as under `delay_param_initialization`, in a given dtype.

    Args:
        tensor_parallelism: whether supported modules are split over the tensor-parallel ranks.
        dtype: of floating-point parameters that name none; by default torch's default dtype.
        tensor_parallel_config: options of the modules that are split.

    Raises:
        ConfigError: `dtype` is no floating-point type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"smp.model_creation: dtype is {dtype!r}. It must be a floating-point type such as "
            "torch.bfloat16, or None."
        )
    with ExitStack() as contexts:
        if tensor_parallelism:
            contexts.enter_context(mark_modules(**tensor_parallel_config))
        contexts.enter_context(deferring())
        if dtype is not None:
            contexts.enter_context(default_dtype(dtype))
        yield
