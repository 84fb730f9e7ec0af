"""Against copies one by one, on the CPU and (marked gpu) on CUDA."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels import buckets as module
from lightning_smp.native.kernels.buckets import flatten_into, unflatten_into
from tests.native.devices import devices

_DEVICES = devices("flatten_into_")
on_devices = pytest.mark.parametrize("device", _DEVICES)

_TYPES = [torch.float32, torch.bfloat16, torch.float16]
_SIZES = {
    "few": [(3, 5), (0,), (), (4096,), (7,), (129, 65), (1, 8)],
    "aligned": [(64, 64), (8,), (30000,)],
    "hundreds": [(1 + (index * 37) % 90,) for index in range(700)],
    "thousands": [(1 + index % 3,) for index in range(2500)],
}
by_sizes = pytest.mark.parametrize("sizes", list(_SIZES.values()), ids=list(_SIZES))


def _tensors(sizes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def _flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Poisoned: what is not written shows."""
    total = sum(tensor.numel() for tensor in tensors)
    return torch.full((total,), math.nan, dtype=dtype, device=tensors[0].device)


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (tensor.float() * scale).to(dtype).reshape(-1)


@on_devices
@pytest.mark.parametrize("scale", [1.0, 0.3])
@by_sizes
def test_there_and_back(sizes: list[tuple[int, ...]], scale: float, device: str) -> None:
    for dtype, flat_type in product(_TYPES, _TYPES):
        tensors = _tensors(sizes, dtype, device)
        flat = _flat(tensors, flat_type)
        flatten_into(flat, tensors, scale=scale)
        everything = torch.cat([tensor.view(-1) for tensor in tensors])
        assert torch.equal(flat, _scaled(everything, scale, flat_type))

        back = [torch.full_like(tensor, math.nan) for tensor in tensors]
        unflatten_into(flat, back, scale=scale)
        found = torch.cat([tensor.view(-1) for tensor in back])
        assert torch.equal(found, _scaled(flat, scale, dtype))


@on_devices
def test_float64_keeps_its_digits(device: str) -> None:
    tensors = [torch.rand(5, dtype=torch.float64, device=device) for _ in range(3)]
    flat = _flat(tensors, torch.float64)
    flatten_into(flat, tensors, scale=1 / 3)
    assert torch.equal(flat, torch.cat(tensors) * (1 / 3))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale_0_gives_zeros_of_anything(dtype: torch.dtype, device: str) -> None:
    tensors = _tensors(_SIZES["few"], dtype, device)
    tensors[0].fill_(math.nan)
    flat = _flat(tensors, torch.float32)
    flatten_into(flat, tensors, scale=0.0)
    assert not flat.any()
    unflatten_into(flat.fill_(math.inf), tensors, scale=0.0)
    assert not any(tensor.any() for tensor in tensors)


@on_devices
def test_tensors_with_gaps_and_odd_addresses(device: str) -> None:
    image = torch.randn(2, 3, 4, 5).to(device, memory_format=torch.channels_last)
    base = torch.randn(1000, device=device)
    tensors = [image, base[1:500], base[::2], base[:300].view(20, 15).t()]
    flat = _flat(tensors, torch.float32)
    flatten_into(flat, tensors)
    assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]))

    targets = [torch.zeros_like(image), torch.zeros(40, device=device)[::2], base[3:10].clone()]
    flat = torch.randn(120 + 20 + 7, device=device)
    unflatten_into(flat, targets)
    assert targets[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in targets]), flat)


@on_devices
def test_a_part_of_a_larger_buffer_only(device: str) -> None:
    whole = torch.full((100,), -1.0, device=device)
    tensors = [torch.ones(13, device=device), torch.ones(20, device=device)]
    flatten_into(whole[5:38], tensors, scale=2.0)
    expected = torch.full((100,), -1.0)
    expected[5:38] = 2.0
    assert torch.equal(whole.cpu(), expected)


@on_devices
def test_autograd_sees_what_is_overwritten(device: str) -> None:
    flat, weight = torch.zeros(4, device=device), torch.ones(4, device=device, requires_grad=True)
    tensors = [torch.ones(4, device=device)]
    product = flat * weight
    flatten_into(flat, tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    product = tensors[0] * weight
    unflatten_into(flat, tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@on_devices
def test_operators_are_declared_right(device: str) -> None:
    tensors = _tensors([(3, 5), (8,)], torch.bfloat16, device)
    flat = torch.randn(23, device=device)
    torch.library.opcheck(module._flatten_into_, (flat, tensors, 0.5))
    torch.library.opcheck(module._unflatten_into_, (flat, tensors, 0.5))


def test_what_does_not_fit_is_refused() -> None:
    flat, tensors = torch.zeros(6), [torch.zeros(2), torch.zeros(4)]
    with pytest.raises(UnsupportedError, match="6 elements need a contiguous flat buffer"):
        flatten_into(torch.zeros(7), tensors)
    with pytest.raises(UnsupportedError, match="6 elements need a contiguous flat buffer"):
        unflatten_into(torch.zeros(6, 2)[:, 0], tensors)
    with pytest.raises(UnsupportedError, match="one floating type"):
        flatten_into(flat, [torch.zeros(2), torch.zeros(4).bfloat16()])
    with pytest.raises(UnsupportedError, match="one floating type"):
        flatten_into(flat, [torch.zeros(2).int(), torch.zeros(4).int()])
    with pytest.raises(UnsupportedError, match="float64 is not converted"):
        flatten_into(flat.double(), tensors)
