"""Units on a GPU that draw from the host's generator, too."""

from __future__ import annotations

import pytest
import torch

from lightning_smp.placed.random import Guard, digest_draws, isolated_draws

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("guard", Guard)
def test_draws_leave_no_trace_and_repeat(guard: Guard) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = digest_draws(device)
    drawn = []
    for _ in range(2):
        with isolated_draws(7, device, guard):
            drawn.append(torch.rand(4, device=device).tolist())
        torch.rand(3, device=device)
    assert drawn[0] == drawn[1]
    assert digest_draws(device) != before  # by the draws outside


def test_what_must_be_guarded_is_known() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = digest_draws(device)
    with isolated_draws(7, device, Guard.ALL) as draws:
        assert draws.needed() is Guard.DEVICE
        torch.rand(1, device=device)
        assert draws.needed() is Guard.DEVICE
        torch.rand(1)
        assert draws.needed() is Guard.TORCH
    assert digest_draws(device) == before
