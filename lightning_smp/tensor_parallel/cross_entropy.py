"""Cross entropy of logits whose vocabulary is split over a tensor group.

Nobody ever has all logits of a row: each rank finds three or four numbers of its part, one
all-gather of those gives every rank the statistics of all rows, and the gradient of a rank's part
follows from them.

Legend: N rows of one rank, g ranks whose rows are here (tp ranks with samples of their own, or 1),
V vocabulary, V_local columns of this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_smp.native.kernels.cross_entropy import (
    CrossEntropySettings,
    Statistics,
    backward_,
    local_statistics,
    merge_statistics,
)
from lightning_smp.tensor_parallel import operations as ops
from lightning_smp.tensor_parallel.collectives import own_slice
from lightning_smp.tensor_parallel.context import TensorParallel

__all__ = ["Buffer", "Loss", "cross_entropy"]


class Buffer:
    """The memory of split logits, shared by all views of them.

    While an object of this class lives, somebody can still read the logits. What reads them in the
    backward is counted by `readers`.
    """

    def __init__(self) -> None:
        self.readers = _Readers()


class _Readers:
    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Loss:
    """The options of a cross entropy, as in `torch.nn.functional.cross_entropy`."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


def cross_entropy(
    local: Tensor,
    targets: Tensor,
    loss: Loss,
    tp: TensorParallel,
    sizes: Sequence[int],
    *,
    rows: Tensor | None = None,
    buffer: Buffer | None = None,
) -> Tensor:
    """Return the loss of this rank's rows: a number, or [N] if nothing is reduced.

    Collective over tp, in the forward, and in the backward if ranks have rows of their own.

    Args:
        local: [g, N, V_local], this rank's columns of everybody's rows.
        targets: [N] integers, or [n] if `rows` chooses n of the N rows.
        loss: the options; a weight together with label smoothing is not supported.
        tp: the tensor group.
        sizes: columns of each rank.
        rows: [n], numbers of the rows that count, each once; None for all.
        buffer: the memory of `local`, if the gradient may overwrite it once nobody can read it.
    """
    own = targets.reshape(-1)
    counted = _spread(own, rows, local.shape[1], loss.ignore_index)
    everybody = ops.all_gather(counted, 0, [len(counted)] * tp.size, tp.rank, tp.group_name) \
        if tp.gathers else counted  # fmt: skip
    settings = CrossEntropySettings(
        vocab_start=sum(sizes[: tp.rank]),
        vocab_size=sum(sizes),
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )
    losses: Tensor = _CrossEntropy.apply(
        local.flatten(0, 1), everybody, settings, _merger(tp), buffer
    )
    if tp.gathers:
        losses = own_slice(losses, tp, 0, [len(counted)] * tp.size)
    if rows is not None:
        losses = losses.index_select(0, rows)
    return _reduce(losses, own, loss)


def _spread(targets: Tensor, rows: Tensor | None, num_rows: int, ignore_index: int) -> Tensor:
    if rows is None:
        return targets
    return targets.new_full((num_rows,), ignore_index).index_copy_(0, rows, targets)


def _merger(tp: TensorParallel) -> Callable[[Statistics], Statistics]:
    def merge(statistics: Statistics) -> Statistics:
        if tp.size == 1:
            return statistics
        parts = ops.all_gather(statistics.packed[None], 0, [1] * tp.size, tp.rank, tp.group_name)
        return merge_statistics(parts)

    return merge


def _reduce(losses: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Weighs and reduces the rows' losses as torch does."""
    counts = targets != loss.ignore_index
    if loss.weight is not None:
        classes = targets.masked_fill(~counts, 0)
        share = loss.weight[classes].to(losses.dtype).masked_fill(~counts, 0.0)
        losses = losses * share
    if loss.reduction == "none":
        return losses
    if loss.reduction == "sum":
        return losses.sum()
    return losses.sum() / (counts.sum() if loss.weight is None else share.sum())


class _CrossEntropy(torch.autograd.Function):
    """Each row's loss; its backward may put the gradient where the logits were."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        settings: CrossEntropySettings,
        merge: Callable[[Statistics], Statistics],
        buffer: Buffer | None,
    ) -> Tensor:
        statistics = merge(local_statistics(logits, targets, settings))
        lse = statistics.logsumexp()
        ctx.save_for_backward(logits, targets, lse)
        ctx.settings = settings
        ctx.readers, ctx.buffer = None, None
        if buffer is not None:
            buffer.readers.count += 1
            ctx.readers, ctx.buffer = buffer.readers, weakref.ref(buffer)
        return statistics.losses(targets, settings, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        if not _is_last_reader(ctx):
            logits = logits.clone(memory_format=torch.contiguous_format)
        return backward_(logits, targets, lse, grad, ctx.settings), None, None, None, None


def _is_last_reader(ctx: Any) -> bool:
    """Whether neither the user's code nor another backward can read the logits any more."""
    if ctx.buffer is None or ctx.buffer() is not None or ctx.readers.count > 1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()
