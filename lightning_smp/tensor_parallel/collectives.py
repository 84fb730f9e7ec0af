"""How activations move between the ranks of a tensor group, with gradients.

Legend: B samples of one rank, S sequence, H hidden size, tp ranks of the group.

Whether the ranks hold different samples or the same decides which two belong together:

* different samples: `gather(x, tp, 0)` brings everybody's samples [tp*B, ...], the work is done
  with this rank's slice of the weights, and `scatter_sum(y, tp, 0)` returns the sums of this rank's
  own samples [B, ...];
* the same samples: `copy_in` and `reduce_out`.

Every function is a collective over the tensor group, in its forward, its backward or both: all
ranks must call in the same order. With one rank each returns its argument, without an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smp.process_state import state
from lightning_smp.tensor_parallel import operations as ops
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.record import split_sizes

__all__ = ["copy_in", "exchange", "gather", "own_slice", "reduce_out", "scatter_sum"]


def gather(
    x: Tensor,
    tp: TensorParallel,
    dim: int,
    sizes: Sequence[int] | None = None,
    *,
    sum_gradient: bool = True,
) -> Tensor:
    """Return the ranks' tensors joined along `dim`.

    Args:
        x: this rank's part; any dtype.
        tp: the tensor group.
        dim: dimension to join.
        sizes: indices of `dim` that each rank brings; by default as many as this rank.
        sum_gradient: what the gradient of this rank's part is. True: the sum of all ranks'
            gradients for it, for consumers that compute a part each. False: this rank's own
            gradient for it, for consumers that every rank computes alike.
    """
    if tp.size == 1:
        return x
    dim = dim % x.dim()
    given = [x.shape[dim]] * tp.size if sizes is None else list(sizes)
    return _apply(_Gather, x, dim, given, tp, sum_gradient)


def scatter_sum(
    x: Tensor, tp: TensorParallel, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's indices of `dim` of the sum over the ranks.

    Args:
        x: this rank's summand, of the full length along `dim`.
        tp: the tensor group.
        dim: dimension to split.
        sizes: indices of `dim` that each rank gets; by default as even as it goes.
    """
    if tp.size == 1:
        return x
    dim = dim % x.dim()
    given = split_sizes(x.shape[dim], tp.size) if sizes is None else sizes
    return _apply(_ScatterSum, x, dim, list(given), tp)


def own_slice(
    x: Tensor, tp: TensorParallel, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's indices of `dim` of a tensor that every rank has.

    The gradient is joined from all ranks. Communicates in the backward only.
    """
    if tp.size == 1:
        return x
    dim = dim % x.dim()
    given = split_sizes(x.shape[dim], tp.size) if sizes is None else sizes
    return _apply(_OwnSlice, x, dim, list(given), tp)


def exchange(
    x: Tensor,
    tp: TensorParallel,
    *,
    split_dim: int,
    join_dim: int,
    split: Sequence[int] | None = None,
    join: Sequence[int] | None = None,
) -> Tensor:
    """Send slice r along `split_dim` to rank r, and join what arrives along `join_dim`.

    ``exchange(x, tp, split_dim=-1, join_dim=0)`` turns own samples [B, S, H] into everybody's
    samples [tp*B, S, H/tp], and with the dimensions exchanged back again.

    Args:
        x: this rank's tensor.
        tp: the tensor group.
        split_dim: dimension that is whole before.
        join_dim: dimension that is whole afterwards.
        split: indices of `split_dim` that each rank gets; by default as even as it goes.
        join: indices of `join_dim` that each rank brings; by default as many as this rank.
    """
    if tp.size == 1:
        return x
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    gets = split_sizes(x.shape[split_dim], tp.size) if split is None else split
    brings = [x.shape[join_dim]] * tp.size if join is None else join
    return _apply(_Exchange, x, (split_dim, list(gets), join_dim, list(brings)), tp)


def copy_in(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return `x`, which every rank has, for consumers that compute a part each.

    Communicates in the backward: the gradient is the sum over the ranks.
    """
    return x if tp.size == 1 else _apply(_CopyIn, x, tp)


def reduce_out(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the sum over the ranks of parts, for consumers that every rank computes alike.

    Communicates in the forward: the gradient of each part is that of the sum.
    """
    return x if tp.size == 1 else _apply(_ReduceOut, x, tp)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _slice(x: Tensor, dim: int, sizes: list[int], rank: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, sizes: list[int], tp: TensorParallel, summed: bool
    ) -> Any:
        ctx.arguments = (dim, sizes, tp, summed)
        ctx.at = state.calls.trail.at
        return ops.all_gather(x, dim, sizes, tp.rank, tp.group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dim, sizes, tp, summed = ctx.arguments
        state.calls.trail.at = ctx.at
        if summed:
            gradient = scatter_sum(gradients[0], tp, dim, sizes)
        else:
            gradient = own_slice(gradients[0], tp, dim, sizes)
        return gradient, None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], tp: TensorParallel) -> Any:
        ctx.arguments = (dim, sizes, tp)
        ctx.at = state.calls.trail.at
        return ops.reduce_scatter(x, dim, sizes, tp.rank, tp.group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dim, sizes, tp = ctx.arguments
        state.calls.trail.at = ctx.at
        return gather(gradients[0], tp, dim, sizes), None, None, None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int], tp: TensorParallel) -> Any:
        ctx.arguments = (dim, sizes, tp)
        ctx.at = state.calls.trail.at
        return _slice(x, dim, sizes, tp.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dim, sizes, tp = ctx.arguments
        state.calls.trail.at = ctx.at
        return gather(gradients[0], tp, dim, sizes, sum_gradient=False), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Any, tp: TensorParallel) -> Any:
        ctx.how, ctx.tp, ctx.at = how, tp, state.calls.trail.at
        return ops.all_to_all(x, *how, tp.rank, tp.group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        split_dim, split, join_dim, join = ctx.how
        state.calls.trail.at = ctx.at
        back = (join_dim, join, split_dim, split)
        return _apply(_Exchange, gradients[0], back, ctx.tp), None, None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Any:
        ctx.tp, ctx.at = tp, state.calls.trail.at
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state.calls.trail.at = ctx.at
        return reduce_out(gradients[0], ctx.tp), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Any:
        ctx.tp, ctx.at = tp, state.calls.trail.at
        return ops.all_reduce(x, tp.group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state.calls.trail.at = ctx.at
        return copy_in(gradients[0], ctx.tp), None
