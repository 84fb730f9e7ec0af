"""Collectives over a tensor group as torch operators, with fake implementations.

Operators, so that fake tensors, `torch.library.opcheck` and the cost model see them. They carry the
group's name; nothing here knows of modules. Each is differentiable as the sum of the losses of all
ranks is: gathering and summing slices are each other's gradients.

The group decides the backend, so the operations are throttled where the group is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_smp.native.kernels.slices import pack
from lightning_smp.process_state import state
from lightning_smp.trail import Operation

__all__ = [
    "COLLECTIVES",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "communicated_bytes",
    "reduce_scatter",
]

Sizes: TypeAlias = Sequence[int]

COLLECTIVES: Final = "lightning_smp_tp"
"""Namespace of the operators."""
_LIBRARY: Final = torch.library.Library(COLLECTIVES, "DEF")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)


def _group(name: str) -> Any:
    """Return the process group that torch has registered under a name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined,unused-ignore]


class _noted:  # noqa: N801 - a context manager, used like a function
    """Notes that an operation runs; the numbers are equal on all ranks of the group."""

    __slots__ = ("_numbers", "_operation")

    def __init__(self, operation: Operation, *numbers: int) -> None:
        self._operation, self._numbers = operation, numbers

    def __enter__(self) -> None:
        state.calls.trail.begin(self._operation, *self._numbers)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:  # what failed in it stays there
            state.calls.trail.end()


def _with_length(x: Tensor, dim: int, length: int) -> list[int]:
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def _pack(x: Tensor, dim: int, sizes: Sizes) -> Tensor:
    """Return the slices of `x` along `dim` one after the other, each padded to the longest.

    The one place where slices are brought into the order that collectives need.
    """
    longest = max(sizes)
    if dim == 0 and min(sizes) == longest:
        return x.contiguous().view(-1)
    if min(sizes) == longest:
        return _joined(x, dim, sizes)
    packed = x.new_empty((len(sizes), *_with_length(x, dim, longest)))
    for place, piece in zip(packed, x.split(list(sizes), dim), strict=True):
        place.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return packed.view(-1)


def _joined(x: Tensor, dim: int, sizes: Sizes) -> Tensor:
    """The slices of `x` one after the other in one buffer."""
    if x.is_floating_point():
        return pack(x, sizes, dim=dim)
    return torch.cat([piece.reshape(-1) for piece in x.split(list(sizes), dim)])


def _all_gather(x: Tensor, dim: int, sizes: Sizes, rank: int, group: str) -> Tensor:
    longest = max(sizes)
    own = x.contiguous()
    if x.shape[dim] != longest:
        own = x.new_empty(_with_length(x, dim, longest))
        own.narrow(dim, 0, x.shape[dim]).copy_(x)
    joined = x.new_empty(len(sizes) * own.numel())
    with _noted(Operation.ALL_GATHER, dim, *sizes):
        _group(group)._allgather_base(joined, own.view(-1)).wait()
    if dim == 0 and min(sizes) == longest:
        return joined.view(len(sizes) * longest, *x.shape[1:])
    out = joined.view(len(sizes), *own.shape)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(out, sizes, strict=True)], dim)


def _all_gather_fake(x: Tensor, dim: int, sizes: Sizes, rank: int, group: str) -> Tensor:
    return x.new_empty(_with_length(x, dim, sum(sizes)))


def _reduce_scatter(x: Tensor, dim: int, sizes: Sizes, rank: int, group: str) -> Tensor:
    packed = _pack(x, dim, sizes)
    out = x.new_empty(_with_length(x, dim, max(sizes)))
    with _noted(Operation.REDUCE_SCATTER, dim, *sizes):
        _group(group)._reduce_scatter_base(out.view(-1), packed).wait()
    if sizes[rank] == out.shape[dim]:
        return out
    return out.narrow(dim, 0, sizes[rank]).contiguous()


def _reduce_scatter_fake(x: Tensor, dim: int, sizes: Sizes, rank: int, group: str) -> Tensor:
    return x.new_empty(_with_length(x, dim, sizes[rank]))


def _all_reduce(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    with _noted(Operation.ALL_REDUCE, *x.shape):
        _group(group).allreduce([out]).wait()
    return out


def _all_reduce_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _all_to_all(
    x: Tensor, split_dim: int, split: Sizes, join_dim: int, join: Sizes, rank: int, group: str
) -> Tensor:
    shape = _with_length(x, split_dim, split[rank])
    shapes = [[*shape[:join_dim], n, *shape[join_dim + 1 :]] for n in join]
    numels = [torch.Size(s).numel() for s in shapes]
    out = x.new_empty(sum(numels))
    row = x.numel() // x.shape[split_dim]
    lengths = [row * n for n in split]
    with _noted(Operation.ALL_TO_ALL, split_dim, *split, join_dim, *join):
        _group(group).alltoall_base(out, _joined(x, split_dim, split), numels, lengths).wait()
    parts = [part.view(s) for part, s in zip(out.split(numels), shapes, strict=True)]
    return torch.cat(parts, join_dim)


def _all_to_all_fake(
    x: Tensor, split_dim: int, split: Sizes, join_dim: int, join: Sizes, rank: int, group: str
) -> Tensor:
    shape = _with_length(x, split_dim, split[rank])
    shape[join_dim] = sum(join)
    return x.new_empty(shape)


def _define(schema: str, kernel: Any, fake: Any) -> Any:
    _LIBRARY.define(schema, tags=_TAGS)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"lightning_smp_tp::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lightning_smp_tp, name).default


all_gather = _define(
    "all_gather(Tensor x, int dim, SymInt[] sizes, int rank, str group) -> Tensor",
    _all_gather,
    _all_gather_fake,
)
"""Joins the ranks' tensors along `dim`; rank r brings `sizes[r]` indices of it."""

reduce_scatter = _define(
    "reduce_scatter(Tensor x, int dim, SymInt[] sizes, int rank, str group) -> Tensor",
    _reduce_scatter,
    _reduce_scatter_fake,
)
"""Sums over the ranks and returns this rank's `sizes[rank]` indices of `dim`."""

all_reduce = _define("all_reduce(Tensor x, str group) -> Tensor", _all_reduce, _all_reduce_fake)
"""Sums over the ranks."""

all_to_all = _define(
    "all_to_all(Tensor x, int split_dim, SymInt[] split, int join_dim, SymInt[] join, int rank, "
    "str group) -> Tensor",
    _all_to_all,
    _all_to_all_fake,
)
"""Sends slice r along `split_dim` to rank r and joins what arrives along `join_dim`."""


def _save_gather(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _gather_backward(ctx: Any, gradient: Tensor) -> Any:
    return reduce_scatter(gradient, *ctx.arguments), None, None, None, None


def _scatter_backward(ctx: Any, gradient: Tensor) -> Any:
    return all_gather(gradient, *ctx.arguments), None, None, None, None


def _reduce_backward(ctx: Any, gradient: Tensor) -> Any:
    return all_reduce(gradient, *ctx.arguments), None


def _exchange_backward(ctx: Any, gradient: Tensor) -> Any:
    split_dim, split, join_dim, join, rank, group = ctx.arguments
    return all_to_all(gradient, join_dim, join, split_dim, split, rank, group), *[None] * 6


for _name, _backward in (
    ("all_gather", _gather_backward),
    ("reduce_scatter", _scatter_backward),
    ("all_reduce", _reduce_backward),
    ("all_to_all", _exchange_backward),
):
    torch.library.register_autograd(
        f"lightning_smp_tp::{_name}", _backward, setup_context=_save_gather, lib=_LIBRARY
    )


def communicated_bytes(operation: Any, args: tuple[Any, ...], result: Tensor) -> int:
    """Return how many bytes a rank sends in one of these operations; 0 for any other.

    Of the ring algorithms: (n - 1) / n of the full tensor, twice for a sum that all ranks get.
    """
    packet = getattr(operation, "overloadpacket", operation)
    full = {
        torch.ops.lightning_smp_tp.all_gather: result,
        torch.ops.lightning_smp_tp.reduce_scatter: args[0] if args else None,
        torch.ops.lightning_smp_tp.all_to_all: result,
        torch.ops.lightning_smp_tp.all_reduce: result,
    }.get(packet)
    if full is None:
        return 0
    size = full.numel() * full.element_size()
    if packet is torch.ops.lightning_smp_tp.all_reduce:
        return 2 * size
    ranks = len(args[2])
    return size * (ranks - 1) // ranks
