"""Scripts of the smp API that build their model without memory, or place it by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_smp as smp
from lightning_smp.deferred import is_deferred
from lightning_smp.errors import PartitionError
from tests.script.rig import STEPS, Net, assert_weights, batches, reference
from tests.support.launch import run_ranks


def _net(*, delayed: bool) -> Net:
    torch.manual_seed(1)
    with smp.model_creation(dtype=torch.double) if delayed else _eager():
        return Net()


class _eager:  # noqa: N801 - stands beside contexts
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.double)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(torch.float32)


def _train(model: Any, optimizer: Any) -> list[float]:
    @smp.step
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, labels=y)["loss"]
        model.backward(loss)
        return loss

    losses = []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        losses.append(float(train(x, y).reduce_mean()))
        optimizer.step()
    return losses


def without_memory(rank: int, size: int, config: dict[str, Any]) -> None:
    smp.init(config)
    plain, net = _net(delayed=False), _net(delayed=True)
    assert all(is_deferred(p) for p in net.parameters())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    model = smp.DistributedModel(net)
    assert any(is_deferred(p) for p in net.parameters()) == (smp.pp_size() > 1)
    losses = _train(model, optimizer)
    assert not any(is_deferred(p) for p in net.parameters())
    torch.testing.assert_close(losses, reference(plain, STEPS))
    assert_weights(model, plain)


def by_hand(rank: int, size: int, config: dict[str, Any]) -> None:
    smp.init({**config, "auto_partition": False, "default_partition": 1})
    plain = _net(delayed=False)
    torch.manual_seed(1)
    net = Net().double()
    with smp.partition(0):
        net.inp = torch.nn.Linear(6, 6, bias=False).double()
    net.load_state_dict(plain.state_dict())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    model = smp.DistributedModel(net)
    smp.set_partition(model.get_module().layers[2], 0)
    with pytest.raises(PartitionError, match=r"smp.partition is 2. With 2 stages"):
        smp.partition(2)
    losses = _train(model, optimizer)
    local = {name.removeprefix("module.") for name, _ in model.local_named_parameters()}
    first = {name for name in plain.state_dict() if name.startswith(("inp.", "layers.2."))}
    assert local == (first if smp.pp_rank() == 0 else set(plain.state_dict()) - first)
    with pytest.raises(PartitionError, match="split already"):
        smp.set_partition(net.layers[0], 0)
    torch.testing.assert_close(losses, reference(plain, STEPS))
    assert_weights(model, plain)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        pytest.param(1, {"microbatches": 2}, id="one"),
        pytest.param(2, {"partitions": 2, "microbatches": 2}, id="pp2"),
        pytest.param(2, {"microbatches": 2, "ddp": True}, id="dp2"),
        pytest.param(
            2, {"partitions": 2, "microbatches": 2, "partition_policy": "tree"}, id="pp2-tree"
        ),
    ],
)
def test_without_memory(size: int, config: dict[str, Any]) -> None:
    run_ranks(without_memory, size, config, timeout=100)


def test_by_hand() -> None:
    run_ranks(by_hand, 2, {"partitions": 2, "microbatches": 2}, timeout=100)
