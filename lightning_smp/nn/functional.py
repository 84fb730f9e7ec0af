"""What the distributed transformer modules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_smp.errors import ConfigError
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = ["activation_function", "add_residual", "alibi_slopes", "attention_bias", "dropout"]

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by its name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation={name!r}: it must be one of {', '.join(map(repr, _ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def dropout(module: DistributedModule, x: Tensor, p: float, *, sliced: bool) -> Tensor:
    """Drop elements: by a stream per rank where `x` is a slice, else alike on all ranks."""
    if p == 0.0 or not module.training:
        return x
    with module.draws(x.device, sliced=sliced):
        return F.dropout(x, p)


def add_residual(x: Tensor, residual: Tensor, *, in_fp32: bool) -> Tensor:
    """Return the sum, in the dtype of `x`; computed in float32 if asked to."""
    if in_fp32 and x.dtype != torch.float64:
        return (x.float() + residual.float()).to(x.dtype)
    return x + residual


def alibi_slopes(num_heads: int, bias_max: int) -> Tensor:
    """Return the slope of each head's linear bias [num_heads].

    2 ** (-bias_max * h / n) for h = 1 ... n (Press et al., "Train Short, Test Long", ICLR 2022);
    where the number of heads is no power of two, n is the next one, and every second slope comes
    first, as in that paper's code.
    """
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = torch.tensor([2.0 ** (-bias_max * h / n) for h in range(1, n + 1)])
    if n == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


def attention_bias(
    mask: Tensor | None, query: Tensor, key: Tensor, *, is_causal: bool, slopes: Tensor | None
) -> Tensor | None:
    """Return what is added to attention scores; None if `is_causal` alone says it.

    Args:
        mask: added to the scores, broadcasts to [B', heads, S_query, S_key].
        query: [B', heads, S_query, D].
        key: [B', heads, S_key, D].
        is_causal: whether a position sees only itself and those before.
        slopes: of a linear bias per head [heads].
    """
    bias = None if mask is None else mask.to(query.dtype)
    if slopes is not None:
        steps = torch.arange(1 - key.shape[2], 1, device=query.device, dtype=query.dtype)
        linear = slopes.to(steps)[:, None, None] * steps
        bias = linear if bias is None else bias + linear
    if bias is None or not is_causal:
        return bias
    ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    return bias.masked_fill(~ones.tril(), -torch.inf)
