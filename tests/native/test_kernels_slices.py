"""Against chunk, contiguous and cat, on the CPU and (marked gpu) on CUDA."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels import slices as module
from lightning_smp.native.kernels.slices import pack, slice_views, unpack
from tests.native.devices import devices

_DEVICES = devices("pack_slices")
on_devices = pytest.mark.parametrize("device", _DEVICES)

_TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
_CUTS: list[tuple[tuple[int, ...], int, list[int]]] = [
    ((2, 3, 64), -1, [32, 32]),  # whole vectors
    ((2, 3, 8 * 300), 2, [800, 1600]),
    ((3, 5, 13), 2, [5, 4, 4]),
    ((4, 6, 7), 1, [1, 0, 5]),
    ((5, 300), 1, [300]),
    ((2, 7), 0, [1, 1]),
    ((0, 4, 8), 2, [4, 4]),
]


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _expected(whole: Tensor, sizes: list[int], dim: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([part.contiguous().to(dtype).view(-1) for part in whole.split(sizes, dim)])


@on_devices
@pytest.mark.parametrize(("shape", "dim", "sizes"), _CUTS, ids=str)
def test_there_and_back(shape: tuple[int, ...], dim: int, sizes: list[int], device: str) -> None:
    for dtype, to in product(_TYPES, _TYPES):
        whole = _values(shape, dtype, device)
        packed = pack(whole, sizes, dim=dim, dtype=to)
        assert torch.equal(packed, _expected(whole, sizes, dim, to))
        back = unpack(packed, shape, sizes, dim=dim, dtype=dtype)
        assert torch.equal(back, whole.to(to).to(dtype))
        views = slice_views(packed, shape, sizes, dim=dim)
        for view, part in zip(views, whole.split(sizes, dim), strict=True):
            assert view.is_contiguous()
            assert torch.equal(view, part.to(to))


@on_devices
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex128], ids=str)
def test_other_types_are_copied(dtype: torch.dtype, device: str) -> None:
    whole = (_values((3, 4, 10), torch.float64, device) * 10).to(dtype)
    packed = pack(whole, [3, 7], dim=2)
    assert torch.equal(packed, _expected(whole, [3, 7], 2, dtype))
    assert torch.equal(unpack(packed, whole.shape, [3, 7], dim=2), whole)


@on_devices
def test_tensors_may_begin_anywhere_and_have_gaps(device: str) -> None:
    base = _values((2 * 3 * 16 + 1,), torch.bfloat16, device)
    whole = base[1:].view(2, 3, 16)  # two bytes past an aligned address
    assert torch.equal(pack(whole, [8, 8], dim=2), _expected(whole, [8, 8], 2, whole.dtype))
    turned = whole.transpose(0, 1)
    assert torch.equal(pack(turned, [8, 8], dim=2), _expected(turned, [8, 8], 2, whole.dtype))


@on_devices
def test_gradients(device: str) -> None:
    whole = _values((2, 3, 5), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pack(x, [2, 3], dim=2), (whole,))
    packed = _values((30,), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unpack(x, (2, 3, 5), [2, 3], dim=2), (packed,))


@on_devices
def test_a_gradient_has_the_type_of_its_tensor(device: str) -> None:
    whole = _values((2, 16), torch.bfloat16, device).requires_grad_()
    weights = _values((32,), torch.float32, device)
    packed = pack(whole, [8, 8], dim=1, dtype=torch.float32)
    (packed * weights).sum().backward()
    expected = unpack(weights, (2, 16), [8, 8], dim=1).bfloat16()
    assert whole.grad is not None
    assert torch.equal(whole.grad, expected)


@on_devices
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32], ids=str)
def test_operators_are_declared_right(to: torch.dtype, device: str) -> None:
    whole = _values((6, 24), torch.bfloat16, device)
    for requires_grad in (False, True):
        x = whole.clone().requires_grad_(requires_grad)
        torch.library.opcheck(module._pack, (x, [8, 16], to))
        flat = whole.view(-1).clone().requires_grad_(requires_grad)
        torch.library.opcheck(module._unpack, (flat, 6, [8, 16], torch.float32))


def test_what_does_not_fit_is_refused() -> None:
    whole = torch.zeros(2, 3, 8)
    with pytest.raises(UnsupportedError, match=r"Slices of \[4, 5\] along dim 2"):
        pack(whole, [4, 5], dim=2)
    with pytest.raises(UnsupportedError, match="along dim 3"):
        pack(whole, [4, 4], dim=3)
    with pytest.raises(UnsupportedError, match="buffer of 47 elements"):
        unpack(torch.zeros(47), (2, 3, 8), [4, 4], dim=2)
