"""The key fp16, as a scenario."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_smp as smp
from tests.script.rig import STEPS, Net, batches, fresh

__all__ = ["half_precision"]


def half_precision() -> None:
    """The key fp16: float16 weights, float32 copies, loss scale, clipping, saved and loaded."""
    torch.manual_seed(1)
    model, first, plain = fresh(Net().float())
    optimizer = smp.DistributedOptimizer(first.optimizer, static_loss_scale=128.0)
    assert next(model.parameters()).dtype is torch.float16

    @smp.step
    def train(x: Tensor, y: Tensor) -> Any:
        out = model(x, labels=y)
        assert out["loss"].dtype is torch.float32
        model.backward(out["loss"])
        return out["loss"]

    def run(count: int) -> list[float]:
        losses = []
        for x, y in batches(STEPS)[:count]:
            optimizer.zero_grad()
            losses.append(float(train(x.float(), y).reduce_mean()))
            optimizer.clip_master_grads(0.5)
            optimizer.step()
            assert not optimizer.overflow
        return losses

    losses = run(STEPS)
    torch.testing.assert_close(losses, _half_reference(plain.half()), rtol=1e-6, atol=1e-6)
    for name, expected in plain.state_dict().items():
        found = model.state_dict()[name].to(expected.device)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [deepcopy(optimizer.state_dict()), deepcopy(optimizer.local_state_dict())]
    expected_losses = run(2)
    for saved in moments:
        model.load_state_dict(weights)
        optimizer.load_state_dict(deepcopy(saved))
        assert run(2) == expected_losses
    with pytest.raises(smp.SMPError, match=r"model\.backward\(loss\) was not called"):
        optimizer.step()
    _check_overflow(model, train)


def _half_reference(net: nn.Module) -> list[float]:
    copies = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.Adam(copies, lr=0.01)
    losses, count = [], smp.num_microbatches()
    for x, y in batches(STEPS):
        net.zero_grad()
        parts = []
        for xs, ys in zip(x.half().chunk(count), y.chunk(count), strict=True):
            loss = net(xs, labels=ys)["loss"].float()
            (loss * 128.0 / count).backward()
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).mean()))
        for copy, parameter in zip(copies, net.parameters(), strict=True):
            copy.grad = parameter.grad.float() / 128.0
        nn.utils.clip_grad_norm_(copies, 0.5)
        optimizer.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, net.parameters(), strict=True):
                parameter.copy_(copy)
    return losses


def _check_overflow(model: Any, train: Any) -> None:
    """A scale that is too large is halved on all ranks, and the steps are skipped."""
    wrapped = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = smp.DistributedOptimizer(
        wrapped, static_loss_scale=None, dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**24, "scale_window": 2},
    )  # fmt: skip
    x, y = batches(1)[0]
    skipped = 0
    while skipped < 24:
        optimizer.zero_grad()
        train(x.float(), y)
        optimizer.step()
        if not optimizer.overflow:
            break
        skipped += 1
    assert 0 < skipped < 24
    assert optimizer.loss_scale == 2.0 ** (24 - skipped)
    assert smp.allgather(skipped) == [skipped] * smp.size()
