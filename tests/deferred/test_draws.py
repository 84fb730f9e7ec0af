"""Leaving out a draw moves the generator as far as drawing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_smp.deferred.draws import Draws, from_state

_ATEN = torch.ops.aten
_SIZES = (1, 15, 16, 17, 31, 1000, 16384, 16399, 16400, 50001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("func", [_ATEN.normal_.default, _ATEN.uniform_.default])
def test_skipping_is_like_filling(func: Any, dtype: torch.dtype) -> None:
    draws = Draws()
    for size in _SIZES:
        drawn, skipped = (torch.Generator().manual_seed(size) for _ in range(2))
        func(torch.empty(size, dtype=dtype), generator=drawn)
        assert draws.skip(func, torch.empty(size, dtype=dtype, device="meta"), skipped)
        assert torch.equal(drawn.get_state(), skipped.get_state()), size


def test_what_cannot_be_left_out_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    meta = torch.empty(64, 64, device="meta")
    draws = Draws()
    assert not draws.skip(_ATEN.exponential_.default, meta, generator)
    assert not draws.skip(_ATEN.normal_.default, meta.t()[::2], generator)
    assert not draws.skip(_ATEN.normal_.default, meta.to(torch.complex64), generator)
    assert torch.equal(before, generator.get_state())


def test_a_state_is_taken_for_a_while() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    expected = torch.rand(3)
    here = torch.get_rng_state()
    with from_state(torch.device("cpu"), state):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), here)
