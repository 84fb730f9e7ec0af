"""A script of the smp API with tensor parallelism equals one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_smp as smp
from tests.support.launch import run_ranks

_SPLIT = ["module.0.0.weight", "module.0.2.weight"]


def _rank(rank: int, world_size: int, stages: int, prescaled: bool) -> None:
    smp.init(
        {
            "partitions": stages, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2,
            "prescaled_batch": prescaled,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        body = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8))
    plain = nn.Sequential(body, nn.ReLU(), nn.Linear(8, 4)).double()
    wanted = copy.deepcopy(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9))
    one_device = torch.optim.SGD(wanted.parameters(), 0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=generator).double(), torch.arange(8) % 4
    own = slice(None) if prescaled else slice(4 * smp.tp_rank(), 4 * smp.tp_rank() + 4)

    @smp.step
    def train(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)  # type: ignore[operator]
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        train(model, x[own], y[own])
        optimizer.step()
        one_device.zero_grad()
        F.cross_entropy(wanted(x), y).backward()
        one_device.step()
    split = [name for name, p in model.named_parameters() if model.is_distributed_parameter(p)]
    assert split == _SPLIT
    assert [name for name, _ in model.scaled_batch_reducer_named_parameters()] == _SPLIT
    assert "module.2.weight" in dict(model.default_reducer_named_parameters())
    assert len(list(model.distributed_modules())) == 2
    next(model.distributed_modules()).register_buffer("inside", torch.zeros(2), persistent=False)
    model.get_module().register_buffer("outside", torch.zeros(2), persistent=False)
    seen = [name for name, b in model.named_buffers() if model.is_scaled_batch_buffer(b)]
    assert [name.rpartition(".")[2] for name in seen] == ["inside"]
    assert not any(model.is_distributed_buffer(b) for b in model.buffers())  # none is split
    torch.testing.assert_close(dict(model.state_dict()), dict(wanted.state_dict()))
    found, expected = optimizer.state_dict()["state"], one_device.state_dict()["state"]
    torch.testing.assert_close(found, expected)
    model.load_state_dict(wanted.state_dict())
    optimizer.load_state_dict(one_device.state_dict())
    torch.testing.assert_close(dict(model.state_dict()), dict(wanted.state_dict()))


@pytest.mark.parametrize(("stages", "prescaled"), [(1, False), (2, True)])
def test_a_script_equals_one_device(stages: int, prescaled: bool) -> None:
    run_ranks(_rank, 2 * stages, stages, prescaled)
