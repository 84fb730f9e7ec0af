"""Gradients, clipping, scaling and gathering over NCCL: two stages, then two replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.amp import make_scaler
from lightning_smp.weights.checkpoint import gather_optimizer_state, gather_state_dict
from lightning_smp.weights.clip import clip_grad_norm, global_clip, grad_norm
from lightning_smp.weights.collect import PipelineLinks
from lightning_smp.weights.gradients import GradientReducer
from lightning_smp.weights.ownership import Ownership, forget_foreign_state, materialize, release
from lightning_smp.weights.sharing import SharingGroups
from tests.support.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(300, 200)
        self.conv = nn.Conv2d(8, 8, 3)
        self.tied = nn.Parameter(torch.randn(50, 40))
        self.b = nn.BatchNorm1d(64)
        self.conv.to(memory_format=torch.channels_last)


def _model() -> Model:
    torch.manual_seed(1)
    return Model()


def _gradient(name: str, parameter: Tensor, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * rank)
    return torch.randn(parameter.shape, generator=generator) * 0.01


def _start(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _replicas(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    device = _start(rank)
    model = _model().to(device, dtype)
    ownership = Ownership.whole(model)
    groups = SharingGroups(ownership, [[0, 1]], lambda ranks: dist.new_group(list(ranks)))
    reducer = GradientReducer(ownership, groups, bucket_bytes=100_000)
    for _ in range(3):
        reducer.start((1.0, 3.0)[rank])
        for name, parameter in reversed(list(model.named_parameters())):
            parameter.grad = None
            if name != "b.bias" or rank == 1:
                parameter.grad = _gradient(name, parameter, rank).to(device, dtype)
                reducer.ready(parameter)
        reducer.finish()
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-8), (torch.bfloat16, 2e-4)])
def test_replicas(dtype: torch.dtype, atol: float) -> None:
    first, second = run_ranks(_replicas, 2, dtype, timeout=120)
    for name, parameter in _model().named_parameters():
        parts = [_gradient(name, parameter, rank) for rank in range(2)]
        expected = 0.75 * parts[1] + (0.0 if name == "b.bias" else 0.25) * parts[0]
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name].float(), expected, rtol=1e-2, atol=atol)


_STAGES = {
    "a.weight": (0,),
    "a.bias": (0,),
    "conv.weight": (1,),
    "conv.bias": (1,),
    "b.weight": (1,),
    "b.bias": (1,),
}


def _stages(rank: int, world_size: int) -> dict[str, object]:
    device = _start(rank)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    buffers = {name: (1,) for name, _ in model.named_buffers()}
    ownership = Ownership(model, _STAGES, buffers=buffers, pp_rank=rank, pp_size=2)
    release(model, ownership)
    materialize(model, ownership, device)
    forget_foreign_state(optimizer, ownership)
    assert all(parameter.device == device for parameter in model.parameters())
    groups = SharingGroups(ownership, [[0], [1]], lambda ranks: dist.new_group(list(ranks)))
    reducer = GradientReducer(ownership, groups)
    reducer.start(4.0)
    for name, parameter in model.named_parameters():
        if ownership.is_local(parameter):
            source = rank if name == "tied" else 0
            parameter.grad = _gradient(name, parameter, source).to(device) * 8.0
            reducer.ready(parameter)
    reducer.finish()
    world = dist.group.WORLD
    scaler = make_scaler(torch.amp.GradScaler("cuda", init_scale=8.0), world, device)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    norms = grad_norm(model, 2.0, ownership, world)
    with global_clip(lambda: ownership, world):
        user = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    again = clip_grad_norm(model.parameters(), 1e6, ownership, world)
    scaler.step(optimizer)
    scaler.update()
    links = PipelineLinks(group=world, ranks=(0, 1), pp_rank=rank, device=device)
    return {
        "norms": {key: value.cpu() for key, value in norms.items()},
        "total": user.cpu(),
        "clipped": again.cpu(),
        "model": gather_state_dict(model, ownership, links),
        "optimizer": gather_optimizer_state(optimizer, ownership, links),
    }


def test_stages() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = _gradient(name, parameter, 0)
        if name == "tied":
            parameter.grad += _gradient(name, parameter, 1)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    first, second = run_ranks(_stages, 2, timeout=120)
    assert second["model"] == second["optimizer"] == {}
    for found in (first, second):
        torch.testing.assert_close(found["total"], total)
        torch.testing.assert_close(found["clipped"], torch.tensor(1.0))
        torch.testing.assert_close(found["norms"]["grad_2.0_norm_total"], total)
        assert len(found["norms"]) == len(list(model.parameters())) + 1
    torch.testing.assert_close(dict(first["model"]), dict(model.state_dict()))
    torch.testing.assert_close(first["optimizer"]["state"], optimizer.state_dict()["state"])
    assert all(value.device.type == "cpu" for value in first["model"].values())
