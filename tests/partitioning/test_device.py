"""One kernel's time on the default device meets what an H200 took; operations become kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_smp.partitioning.device import CPU, DeviceModel, Kernel
from lightning_smp.partitioning.operations import kernel_of

H200 = DeviceModel()
_BF16 = torch.bfloat16


def _product(m: int, k: int, n: int, bits: int = 16) -> Kernel:
    size = bits // 8
    kind: Any = "product" if n % 8 == 0 else "unaligned"
    moved = size * (m * k + k * n + m * n)
    return Kernel(kind, flops=2 * m * k * n, moved=moved, is_16_bit=bits == 16)


# Microseconds in the middle of a training step, or of launches back to back (with gaps of 1.5).
@pytest.mark.parametrize(
    ("kernel", "us"),
    [
        (_product(1024, 1024, 1024), 8.0),
        (_product(8192, 1024, 1024), 27.0),
        (_product(8192, 1024, 4096), 96.0),
        (_product(4096, 5120, 1280), 72.0),
        (_product(8192, 8192, 8192), 1360.0),
        (_product(8192, 1024, 50257), 6800.0),  # mean of forward and both gradients
        (_product(8192, 2048, 2048, 32), 1360.0),
        (Kernel("stream", moved=12 * 8192 * 2048), 51.0),  # sum in 32 bits
        (Kernel("stream", moved=6 * 8192 * 8192 // 4), 28.0),  # 32 to 16 bits
        (Kernel("stream", moved=6 * 8192 * 4096, elements=8192 * 4096), 98.5),  # 16 to 32 bits
        (Kernel("stream", moved=4 * 8192 * 3072, elements=8192 * 3072), 79.7),  # another order
        (Kernel("rows", moved=8 * 8192 * 2048), 57.0),  # layer norm
        (Kernel("rows", moved=20 * 8192 * 1024), 72.0),  # its backward
        (Kernel("attention", flops=2 * 64 * 2048**2 * 128, is_16_bit=True, head=128), 144.0),
        (Kernel("attention", flops=2 * 128 * 1024**2 * 64, is_16_bit=True, head=64), 61.5),
    ],
)
def test_kernel_meets_measurement(kernel: Kernel, us: float) -> None:
    assert H200.seconds(kernel) * 1e6 == pytest.approx(us, rel=0.25)


def test_a_unit_takes_what_issuing_its_kernels_takes() -> None:
    tiny = [Kernel("stream", moved=64)] * 10
    assert H200.unit_seconds(tiny) == pytest.approx(10 * H200.host_s)
    large = [_product(8192, 8192, 8192)] * 10
    assert H200.unit_seconds(large) == pytest.approx(10 * H200.seconds(large[0]))
    assert CPU.unit_seconds(large) > 100 * H200.unit_seconds(large)


def _of(func: Any, *args: Any, **kwargs: Any) -> Kernel | None:
    return kernel_of(func, args, kwargs, func(*args, **kwargs))


def test_views_and_empty_tensors_are_free() -> None:
    x = torch.zeros(4, 6)
    aten = torch.ops.aten
    assert _of(aten.t.default, x) is None
    assert _of(aten.detach.default, x) is None
    assert _of(aten._unsafe_view.default, x, [24]) is None
    assert _of(aten.empty_like.default, x) is None
    assert _of(aten.add_.Tensor, x, x) is not None


def test_elements_move_one_at_a_time_where_types_shapes_or_orders_differ() -> None:
    aten = torch.ops.aten
    x, narrow = torch.zeros(8, 6), torch.zeros(8, 6, dtype=_BF16)

    def single(func: Any, *args: Any, **kwargs: Any) -> float:
        kernel = _of(func, *args, **kwargs)
        assert kernel is not None
        return kernel.elements

    assert single(aten.add.Tensor, x, x) == 0
    assert single(aten._to_copy.default, x, dtype=_BF16) == 0
    assert single(aten._to_copy.default, narrow, dtype=torch.float32) == 48
    assert single(aten.add.Tensor, x, narrow) == 48
    assert single(aten.mul.Tensor, x, torch.zeros(6)) == 48
    assert single(aten.mul.Tensor, x, torch.zeros(())) == 0
    assert single(aten.add.Tensor, x, torch.zeros(6, 8).t()) == 48
    assert single(aten.mul.Tensor, x.t(), x.t()) == 0
    assert single(aten.clone.default, x.t(), memory_format=torch.contiguous_format) == 48
    assert single(aten.cat.default, [x, x]) == 0
    assert single(aten.cat.default, [x, x], 1) == 96


def test_rows_that_begin_anywhere_make_slow_products() -> None:
    mm = torch.ops.aten.mm.default

    def kind(a: Tensor, b: Tensor) -> str:
        kernel = _of(mm, a, b)
        assert kernel is not None
        return kernel.kind

    half = torch.zeros(16, 8, dtype=_BF16)
    assert kind(half, torch.zeros(8, 24, dtype=_BF16)) == "product"
    assert kind(half, torch.zeros(8, 25, dtype=_BF16)) == "unaligned"
    assert kind(half, torch.zeros(25, 8, dtype=_BF16).t()) == "unaligned"  # so is what it writes
    assert kind(half.float(), torch.zeros(8, 25)) == "product"
    expanded = torch.zeros(16, 1, dtype=_BF16).expand(16, 8)  # is copied first
    assert kind(expanded, torch.zeros(8, 24, dtype=_BF16)) == "product"
    assert kind(torch.zeros(16, 12, dtype=_BF16)[:, :8], torch.zeros(8, 24, dtype=_BF16)) == (
        "unaligned"
    )


def test_losses_read_one_logarithm_of_a_row() -> None:
    logs, target = torch.zeros(8, 100), torch.zeros(8, dtype=torch.long)
    forward = torch.ops.aten.nll_loss_forward.default
    backward = torch.ops.aten.nll_loss_backward.default
    kernel = _of(forward, logs, target, None, 1, -100)
    assert kernel is not None
    assert kernel.moved == 8
    total = torch.tensor(8.0)
    kernel = _of(backward, torch.tensor(1.0), logs, target, None, 1, -100, total)
    assert kernel is not None
    assert kernel.moved == 4 * 800
