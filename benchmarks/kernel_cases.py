"""What `benchmarks.kernels` measures: for each kernel and size, contenders and their reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_smp.native.kernels.buckets import flatten_into, unflatten_into
from lightning_smp.native.kernels.cross_entropy import CrossEntropySettings, cross_entropy
from lightning_smp.native.kernels.slices import pack, unpack

__all__ = ["Case", "Contender", "cases"]

_BF16, _F32 = torch.bfloat16, torch.float32


def _fill_caches() -> None:
    # Several times the second-level cache.
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()


@dataclass(frozen=True)
class Contender:
    """One way to the result.

    Attributes:
        run: makes the result.
        error: compares the last one with the reference.
        prepare: comes before each run.
    """

    run: Callable[[], object]
    error: Callable[[], float]
    prepare: Callable[[], object] = _fill_caches


@dataclass(frozen=True)
class Case:
    """A row group of the table; `make` allocates, so that only one case is in memory."""

    kernel: str
    size: str
    moved_bytes: int
    tolerance: float
    make: Callable[[], dict[str, Contender]]


def cases(kernels: Sequence[str]) -> Iterator[Case]:
    """All cases of the named kernels.

    Args:
        kernels: out of cross_entropy, slices, buckets.
    """
    makers = {"cross_entropy": _losses, "slices": _slices, "buckets": _buckets}
    for kernel in kernels:
        yield from makers[kernel]()


def _losses() -> Iterator[Case]:
    for rows, columns, dtype in (
        (8192, 131072, _BF16),
        (8192, 50257, _BF16),
        (8192, 32768, _F32),
        (65536, 1000, _BF16),
    ):
        # The forward reads the logits, the backward reads them and writes the gradient.
        moved = 3 * rows * columns * dtype.itemsize
        size = f"{rows} x {columns} {_name(dtype)}"

        def make(rows: int = rows, columns: int = columns, dtype: torch.dtype = dtype):  # type: ignore[no-untyped-def]
            return _make_losses(rows, columns, dtype)

        yield Case("cross entropy, forward + backward", size, moved, 5e-3, make)


def _make_losses(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Contender]:
    logits = torch.empty(rows, columns, dtype=dtype, device="cuda").normal_()
    targets = torch.randint(0, columns, (rows,), device="cuda")
    settings = CrossEntropySettings(0, columns)
    x = logits[-4:].double().requires_grad_()
    loss = F.cross_entropy(x, targets[-4:], reduction="sum") / rows
    (expected,) = torch.autograd.grad(loss, x)

    def eager(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x, targets)

    def ours(x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(x, targets, settings, overwrite_logits=True).mean()

    def liger(x: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        return liger_cross_entropy(x, targets)

    losses = {
        "ours": ours,
        "eager": eager,
        "eager, float()": lambda x, t: eager(x.float(), t),
        "torch.compile": torch.compile(eager, dynamic=False),
        "liger-kernel": liger,
    }
    work = torch.empty_like(logits)
    return {
        name: _loss_contender(loss, work, logits, targets, expected)
        for name, loss in losses.items()
    }


def _loss_contender(
    loss: Callable[[Tensor, Tensor], Tensor],
    work: Tensor,
    logits: Tensor,
    targets: Tensor,
    expected: Tensor,
) -> Contender:
    """Works on a copy of the logits, made anew before each run: some overwrite it."""
    gradients: list[Tensor] = []

    def prepare() -> None:
        gradients.clear()
        work.copy_(logits)

    def run() -> None:
        x = work.detach().requires_grad_()
        gradients[:] = torch.autograd.grad(loss(x, targets), x)

    def error() -> float:
        return _relative(gradients.pop()[-4:], expected)

    return Contender(run, error, prepare)


def _slices() -> Iterator[Case]:
    for shape, ranks, dtype, to in (
        ((8, 4096, 8192), 8, _BF16, _BF16),
        ((8, 4096, 8192), 8, _F32, _BF16),
        ((8, 4096, 8192), 8, _BF16, _F32),
        ((16, 2048, 1600), 3, _BF16, _BF16),
    ):
        moved = math.prod(shape) * (dtype.itemsize + to.itemsize)
        cast = _name(dtype) if dtype == to else f"{_name(dtype)} to {_name(to)}"
        size = f"{list(shape)} over {ranks}, {cast}"
        sizes = [shape[-1] // ranks + (rank < shape[-1] % ranks) for rank in range(ranks)]

        def make_pack(shape=shape, sizes=sizes, dtype=dtype, to=to):  # type: ignore[no-untyped-def]
            return _make_pack(shape, sizes, dtype, to)

        def make_unpack(shape=shape, sizes=sizes, dtype=dtype, to=to):  # type: ignore[no-untyped-def]
            return _make_unpack(shape, sizes, dtype, to)

        yield Case("pack", size, moved, 0.0, make_pack)
        yield Case("unpack", size, moved, 0.0, make_unpack)


def _make_pack(
    shape: tuple[int, ...], sizes: list[int], dtype: torch.dtype, to: torch.dtype
) -> dict[str, Contender]:
    whole = torch.randn(shape, dtype=dtype, device="cuda")
    expected = torch.cat([part.to(to).reshape(-1) for part in whole.split(sizes, -1)])

    def eager() -> Tensor:
        parts = [part.contiguous().to(to) for part in whole.split(sizes, -1)]
        return torch.cat([part.view(-1) for part in parts])

    def copies() -> Tensor:
        packed = torch.empty(whole.numel(), dtype=to, device="cuda")
        parts = packed.split([whole.numel() // shape[-1] * size for size in sizes])
        for part, columns in zip(parts, whole.split(sizes, -1), strict=True):
            part.view(columns.shape).copy_(columns)
        return packed

    runs = {
        "ours": lambda: pack(whole, sizes, dim=-1, dtype=to),
        "chunk + contiguous + cat": eager,
        "copy_ of each slice": copies,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    return {name: _result_contender(run, expected) for name, run in runs.items()}


def _make_unpack(
    shape: tuple[int, ...], sizes: list[int], dtype: torch.dtype, to: torch.dtype
) -> dict[str, Contender]:
    packed = torch.randn(math.prod(shape), dtype=dtype, device="cuda")
    rows = math.prod(shape[:-1])

    def eager() -> Tensor:
        parts = packed.split([rows * size for size in sizes])
        shaped = [p.view(*shape[:-1], size) for p, size in zip(parts, sizes, strict=True)]
        return torch.cat(shaped, -1).to(to)

    expected = eager()
    runs = {
        "ours": lambda: unpack(packed, shape, sizes, dim=-1, dtype=to),
        "cat": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    return {name: _result_contender(run, expected) for name, run in runs.items()}


def _result_contender(run: Callable[[], Tensor], expected: Tensor) -> Contender:
    results: list[Tensor] = []

    def prepare() -> None:
        results.clear()
        _fill_caches()

    def keep() -> None:
        results[:] = [run()]

    return Contender(keep, lambda: _relative(results.pop(), expected), prepare)


def _buckets() -> Iterator[Case]:
    # Twelve tensors a layer, as in a transformer; and many small ones.
    layers = [(4096, 1024), (1024, 4096), (3 * 1024, 1024), (1024, 1024), *[(1024,)] * 6, (4096,)]
    for name, shapes in (
        ("24 layers", layers * 24),
        ("1 layer", layers),
        ("600 of 3 to 20000", [(3 + (index * 7919) % 20000,) for index in range(600)]),
    ):
        for dtype, to in ((_BF16, _BF16), (_BF16, _F32), (_F32, _F32)):
            elements = sum(math.prod(shape) for shape in shapes)
            cast = _name(dtype) if dtype == to else f"{_name(dtype)} to {_name(to)}"
            size = f"{name}: {len(shapes)} tensors, {elements / 1e6:.1f} M, {cast}"
            moved = elements * (dtype.itemsize + to.itemsize)

            def make(shapes=shapes, dtype=dtype, to=to):  # type: ignore[no-untyped-def]
                return _make_flatten(shapes, dtype, to)

            def make_back(shapes=shapes, dtype=dtype, to=to):  # type: ignore[no-untyped-def]
                return _make_unflatten(shapes, dtype, to)

            yield Case("flatten", size, moved, 1e-2, make)
            back = size.removesuffix(cast) + " to ".join(reversed(cast.split(" to ")))
            yield Case("unflatten", back, moved, 1e-2, make_back)


_SCALE = 0.37


def _make_flatten(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, to: torch.dtype
) -> dict[str, Contender]:
    tensors = [torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes]
    expected = torch.cat([(tensor.float() * _SCALE).to(to).view(-1) for tensor in tensors])
    flat = torch.full_like(expected, math.nan)
    views = _views(flat, tensors)

    def cat() -> Tensor:
        return torch.cat([tensor.view(-1) for tensor in tensors]).to(to).mul_(_SCALE)

    def foreach() -> None:
        torch._foreach_copy_(views, tensors)
        flat.mul_(_SCALE)

    def ddp() -> None:
        for view, tensor in zip(views, tensors, strict=True):
            torch.mul(tensor, _SCALE, out=view)

    runs = {
        "ours": lambda: flatten_into(flat, tensors, scale=_SCALE),
        "_foreach_copy_ + mul_": foreach,
        "one by one (DDP)": ddp,
    }
    made = {name: _written_contender(run, [flat], [expected]) for name, run in runs.items()}
    return {**made, "cat + mul_": _result_contender(cat, expected)}


def _make_unflatten(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, to: torch.dtype
) -> dict[str, Contender]:
    """From `to`, the type of the buffer, to `dtype`."""
    tensors = [torch.full(shape, math.nan, dtype=dtype, device="cuda") for shape in shapes]
    flat = torch.randn(sum(tensor.numel() for tensor in tensors), dtype=to, device="cuda")
    views = _views(flat, tensors)
    expected = [(view.float() * _SCALE).to(dtype) for view in views]

    def foreach() -> None:
        torch._foreach_copy_(tensors, views)
        torch._foreach_mul_(tensors, _SCALE)

    def ddp() -> None:
        for view, tensor in zip(views, tensors, strict=True):
            torch.mul(view, _SCALE, out=tensor) if dtype == to else tensor.copy_(view).mul_(_SCALE)

    runs = {
        "ours": lambda: unflatten_into(flat, tensors, scale=_SCALE),
        "_foreach_copy_ + _foreach_mul_": foreach,
        "one by one (DDP)": ddp,
    }
    return {name: _written_contender(run, tensors, expected) for name, run in runs.items()}


def _views(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _written_contender(
    run: Callable[[], None], written: list[Tensor], expected: list[Tensor]
) -> Contender:
    def error() -> float:
        pairs = zip(written, expected, strict=True)
        found = max(_relative(actual, right) for actual, right in pairs)
        for tensor in written:
            tensor.fill_(math.nan)
        return found

    return Contender(run, error)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """NaN never passes as small."""
    found = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    return math.inf if math.isnan(found) else found


def _name(dtype: torch.dtype) -> str:
    return {_BF16: "bf16", _F32: "fp32"}[dtype]
