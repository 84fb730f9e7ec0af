"""Cross entropy over a vocabulary that may be split: local statistics, merging, gradient in place.

Shapes: N rows (tokens), V columns of this part of the vocabulary, R parts.

A row's loss needs four numbers of its logits x: the maximum m, the sum of exp(x - m), the logit of
the target, and, for label smoothing, the sum of x. `local_statistics` finds them for a part of the
vocabulary in one pass, `merge_statistics` joins those of the parts (its caller moves them between
ranks), and `backward_` turns the logits into their gradient without another buffer of that size.
Label smoothing is that of `torch.nn.functional.cross_entropy`: with e = label_smoothing and the
whole vocabulary's size C, loss = lse - (1 - e) x[target] - (e / C) sum(x), where
lse = m + log(sum of exp(x - m)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels.library import declare, prepare

__all__ = [
    "CrossEntropySettings",
    "Statistics",
    "backward_",
    "cross_entropy",
    "local_statistics",
    "merge_statistics",
]

# What the reference converts at a time: no temporary as large as the logits.
_CHUNK_ELEMENTS: Final = 2**20


@dataclass(frozen=True, slots=True)
class CrossEntropySettings:
    """Which part of the vocabulary the logits are, and how the loss is defined.

    Attributes:
        vocab_start: the class of the first column.
        vocab_size: classes of the whole vocabulary (C), not only of this part.
        ignore_index: rows with this target have loss and gradient zero.
        label_smoothing: e, from 0 to 1.
    """

    vocab_start: int
    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a loss needs to know of each row of logits.

    Attributes:
        packed: [K, N], float32 (float64 for float64 logits): the maximum, the sum of
            exp(x - maximum), the target's logit (0 where the target is ignored or in another part)
            and, only if labels are smoothed (K = 4, else 3), the sum of x. One tensor, so that one
            all-gather moves it.
    """

    packed: Tensor

    @property
    def maximum(self) -> Tensor:
        """[N]: minus infinity for a part without columns."""
        return self.packed[0]

    @property
    def sum_exp(self) -> Tensor:
        """[N]: relative to `maximum`."""
        return self.packed[1]

    @property
    def target_logit(self) -> Tensor:
        """[N]."""
        return self.packed[2]

    @property
    def logit_sum(self) -> Tensor:
        """[N]; only if labels are smoothed."""
        return self.packed[3]

    def logsumexp(self) -> Tensor:
        """[N]: log of the sum of exp(x), of the whole vocabulary once parts are merged."""
        return self.maximum + self.sum_exp.log()

    def losses(self, targets: Tensor, settings: CrossEntropySettings, lse: Tensor) -> Tensor:
        """[N]: each row's loss; 0 where the target is ignored. Of merged statistics.

        Args:
            targets: [N], as given to `local_statistics`.
            settings: likewise.
            lse: `logsumexp()`, which the gradient needs too.
        """
        smoothing = settings.label_smoothing
        loss = lse - self.target_logit
        if smoothing:
            loss += smoothing * (self.target_logit - self.logit_sum / settings.vocab_size)
        return loss.masked_fill_(targets == settings.ignore_index, 0.0)


def local_statistics(logits: Tensor, targets: Tensor, settings: CrossEntropySettings) -> Statistics:
    """The statistics of this part of the vocabulary, in one pass; not differentiable.

    Args:
        logits: [N, V], float32, bfloat16, float16 or float64; rows may be further apart than V.
        targets: [N], integers: classes of the whole vocabulary, or `ignore_index`.
        settings: which part this is; its `label_smoothing` says whether the sum of x is needed.

    Raises:
        UnsupportedError: the logits are not a matrix of rows without gaps, or targets do not fit.
        IndexError: on the CPU, a target is no class; on CUDA that is a device-side assertion, as it
            is with torch's own loss.
    """
    _check(logits, targets, settings)
    prepare(logits)
    packed = _statistics(
        logits.detach(),
        targets.long().contiguous(),
        settings.vocab_start,
        settings.vocab_size,
        settings.ignore_index,
        settings.label_smoothing > 0,
    )
    return Statistics(packed)


def merge_statistics(packed_parts: Tensor) -> Statistics:
    """Joins the statistics of all parts of the vocabulary.

    Args:
        packed_parts: [R, K, N]: `Statistics.packed` of each part, in any order.
    """
    maxima = packed_parts[:, 0]
    maximum = maxima.amax(0)
    # A row of minus infinities alone has no finite reference point; exp(-inf - 0) is 0, as it must.
    reference = maximum.masked_fill(maximum == -torch.inf, 0.0)
    sums = packed_parts[:, 1] * (maxima - reference).exp_()
    return Statistics(torch.cat([maximum[None], sums.sum(0)[None], packed_parts[:, 2:].sum(0)]))


def backward_(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, settings: CrossEntropySettings
) -> Tensor:
    """Overwrites the logits with their gradient, and returns them.

    Column v of a row becomes g (exp(x[v] - lse) - (1 - e) [v is the target] - e / C), and 0 in
    ignored rows. Counts as an in-place change: autograd refuses other uses of the logits that need
    their values.

    Args:
        logits: [N, V], as given to `local_statistics`.
        targets: [N], likewise.
        lse: [N], of the whole vocabulary: `Statistics.logsumexp` of the merged statistics.
        grad: [N], g: the gradient of each row's loss.
        settings: as given to `local_statistics`.

    Raises:
        UnsupportedError: as `local_statistics`; or rows overlap.
    """
    _check(logits, targets, settings)
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise UnsupportedError(
            f"The gradient cannot overwrite logits whose rows overlap (stride "
            f"{logits.stride(0)}, {logits.shape[1]} columns): pass logits.contiguous()."
        )
    prepare(logits)
    _backward_(
        logits.detach(),
        targets.long().contiguous(),
        lse.contiguous(),
        grad.to(lse.dtype).contiguous(),
        settings.vocab_start,
        settings.vocab_size,
        settings.ignore_index,
        settings.label_smoothing,
    )
    torch.autograd.graph.increment_version(logits)
    return logits


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    settings: CrossEntropySettings,
    *,
    merge: Callable[[Statistics], Statistics] | None = None,
    overwrite_logits: bool,
) -> Tensor:
    """Each row's loss [N], in float32 (float64 for float64 logits); differentiable in the logits.

    With `merge`, collective over the ranks that hold the parts, in the forward only.

    Args:
        logits: [N, V], see `local_statistics`.
        targets: [N], likewise; the same on all ranks.
        settings: which part of the vocabulary the logits are, and the loss.
        merge: gives the statistics of the whole vocabulary for those of this part (a gather
            between ranks and `merge_statistics`); None where the logits are the whole vocabulary.
        overwrite_logits: whether the backward puts the gradient into the logits' own memory. Only
            for logits that nobody reads afterwards; a second backward is then an error.

    Raises:
        UnsupportedError: see `local_statistics`.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, settings, merge, overwrite_logits)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, which exist anyway, the targets and one number a row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        settings: CrossEntropySettings,
        merge: Callable[[Statistics], Statistics] | None,
        overwrite_logits: bool,
    ) -> Tensor:
        statistics = local_statistics(logits, targets, settings)
        if merge is not None:
            statistics = merge(statistics)
        lse = statistics.logsumexp()
        ctx.save_for_backward(logits, targets, lse)
        ctx.settings, ctx.overwrite_logits = settings, overwrite_logits
        return statistics.losses(targets, settings, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        if not ctx.overwrite_logits:
            logits = logits.clone()
        return backward_(logits, targets, lse, grad, ctx.settings), None, None, None, None


def _check(logits: Tensor, targets: Tensor, settings: CrossEntropySettings) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or targets.shape != logits.shape[:1]:
        raise UnsupportedError(
            f"Cross entropy takes logits [N, V] of a floating type and targets [N]; met "
            f"{list(logits.shape)} of {logits.dtype} and {list(targets.shape)}. View them so."
        )
    if targets.is_floating_point():
        raise UnsupportedError(
            f"Cross entropy takes classes as targets, not probabilities ({targets.dtype})."
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise UnsupportedError(
            f"Cross entropy takes logits whose rows have no gaps; met strides "
            f"{list(logits.stride())}. Pass logits.contiguous()."
        )
    if not 0 <= settings.vocab_start <= settings.vocab_size - logits.shape[1]:
        raise UnsupportedError(
            f"A part of the vocabulary with {logits.shape[1]} classes from {settings.vocab_start} "
            f"on does not lie inside the whole of {settings.vocab_size}."
        )


def _row_chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(at, at + rows) for at in range(0, logits.shape[0], rows)]


def _find_targets(
    targets: Tensor, part: range, vocab_size: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Returns which rows' targets are in this part [N], and their columns there [N, 1].

    Without waiting for a device. Columns of other rows are valid, but mean nothing.

    Raises:
        IndexError: a target is no class of the vocabulary.
    """
    is_counted = targets != ignore_index
    is_bad = is_counted & ((targets < 0) | (targets >= vocab_size))
    if targets.device.type != "cpu":
        torch._assert_async(~is_bad.any(), "a target of cross entropy is no class")
    elif bool(is_bad.any()):
        raise IndexError(
            f"Target {int(targets[is_bad][0])} is no class: classes are 0 to {vocab_size - 1}, and "
            f"{ignore_index} is ignored."
        )
    is_here = is_counted & (targets >= part.start) & (targets < part.stop)
    return is_here, (targets - part.start).clamp(0, len(part) - 1)[:, None]


def _reference_statistics(
    logits: Tensor,
    targets: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    with_sum: bool,
) -> Tensor:
    packed = _fake_statistics(logits, targets, vocab_start, vocab_size, ignore_index, with_sum)
    packed.zero_()
    packed[0].fill_(-torch.inf)
    part = range(vocab_start, vocab_start + logits.shape[1])
    is_here, columns = _find_targets(targets, part, vocab_size, ignore_index)
    if not logits.shape[1]:
        return packed
    target_logits = logits.gather(1, columns)[:, 0].to(packed.dtype)
    packed[2] = target_logits.masked_fill_(~is_here, 0.0)
    for chunk in _row_chunks(logits):
        x = logits[chunk].to(packed.dtype)
        maximum = x.amax(1)
        packed[0, chunk] = maximum
        if with_sum:
            packed[3, chunk] = x.sum(1)
        reference = maximum.masked_fill(maximum == -torch.inf, 0.0)
        packed[1, chunk] = (x - reference[:, None]).exp_().sum(1)
    return packed


def _fake_statistics(
    logits: Tensor,
    targets: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    with_sum: bool,
) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty((4 if with_sum else 3, logits.shape[0]), dtype=dtype)


def _reference_backward_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    part = range(vocab_start, vocab_start + logits.shape[1])
    is_here, columns = _find_targets(targets, part, vocab_size, ignore_index)
    if not logits.shape[1]:
        return
    at_target = is_here.to(lse.dtype)[:, None] * (label_smoothing - 1.0)
    is_ignored = (targets == ignore_index)[:, None]
    for chunk in _row_chunks(logits):
        x = logits[chunk].to(lse.dtype, copy=True)
        x.sub_(lse[chunk, None]).exp_().sub_(label_smoothing / vocab_size)
        x.scatter_add_(1, columns[chunk], at_target[chunk])
        logits[chunk] = x.mul_(grad[chunk, None]).masked_fill_(is_ignored[chunk], 0.0)


def _fake_backward_(*_: Any) -> None:
    return None


_statistics = declare(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int vocab_start, int vocab_size, "
    "int ignore_index, bool with_sum) -> Tensor",
    _reference_statistics,
    _fake_statistics,
)
_backward_ = declare(
    "cross_entropy_backward_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor grad, "
    "int vocab_start, int vocab_size, int ignore_index, float label_smoothing) -> ()",
    _reference_backward_,
    _fake_backward_,
)
