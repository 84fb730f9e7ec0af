"""A script whose units move between two steps trains as one device does."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from tests.support.launch import run_ranks

_STEPS, _AFTER = 6, 3
_SLOW = (2, 3)


class _Slow(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        time.sleep(0.05)  # far above what a busy machine adds
        return self.inner(h)


def _train(rank: int, world_size: int) -> None:
    import lightning_smp as smp
    from tests.script.rig import Net, assert_weights, batches, fresh, reference

    smp.init({"partitions": 2, "microbatches": 4})
    torch.manual_seed(1)
    net = Net(tied=True).double()
    for n in _SLOW:
        net.layers[n] = _Slow(net.layers[n])
    model, optimizer, plain = fresh(net)
    for n in _SLOW:
        plain.layers[n] = plain.layers[n].inner
    model.rebalance(after_steps=_AFTER)

    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, labels=y)["loss"]
        model.backward(loss)
        return loss

    losses, places = [], []
    for x, y in batches(_STEPS):
        optimizer.zero_grad()
        losses.append(float(train(x, y).reduce_mean()))
        places.append(dict(model.deployment.partition.stage_of))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert model.rebalanced.moved, model.rebalanced
    assert places[_AFTER - 1] == places[0] != places[_AFTER] == places[-1]
    last = places[-1]
    assert last["layers.3"] == 1  # the two slow ones, which lay together, are on two stages
    assert {last[f"layers.{n}"] for n in range(3)} == {0}
    expected = reference(plain, _STEPS, clip=0.5)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)
    for n in _SLOW:
        plain.layers[n] = _Slow(plain.layers[n])
    assert_weights(model, plain)


def test_a_script_is_rebalanced() -> None:
    run_ranks(_train, 2, timeout=60)
