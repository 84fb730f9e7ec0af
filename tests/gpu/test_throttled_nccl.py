"""The backend "smp" around NCCL: a world of one rank on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lightning_smp.native.backend as native
from tests.native.built import backend_module

pytestmark = pytest.mark.gpu

Start = Callable[..., dist.ProcessGroup]


@pytest.fixture(params=["lazy", "eager"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the default group; "eager" connects the communicator at once."""
    backend_module()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)

    def begin(limit: int = 2, backend: str = "smp", **options: Any) -> dist.ProcessGroup:
        monkeypatch.setenv("SMP_NCCL_THROTTLE_LIMIT", str(limit))
        native.register()
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60),
            device_id=device if request.param == "eager" else None, **options,
        )  # fmt: skip
        world = dist.group.WORLD
        assert world is not None
        return world

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def value() -> torch.Tensor:
    return torch.arange(4.0, device="cuda")


def inner_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda")).inner


@pytest.mark.parametrize("limit", [-1, 1, 8])
def test_collectives(start: Start, limit: int) -> None:
    world = start(limit)
    assert isinstance(inner_of(world), dist.ProcessGroupNCCL)
    expected = value()
    out, outs = torch.zeros_like(expected), [torch.zeros_like(expected)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(out.copy_(expected)),
        lambda: dist.broadcast(out.copy_(expected), 0),
        lambda: dist.reduce(out.copy_(expected), 0),
        lambda: dist.all_gather_into_tensor(out, expected),
        lambda: dist.reduce_scatter_tensor(out, expected),
        lambda: dist.reduce_scatter(out, [expected]),
        lambda: dist.all_to_all_single(out, expected),
        lambda: dist.all_to_all([out], [expected]),
        lambda: dist.scatter(out, [expected], 0),
        lambda: out.copy_(functional.all_reduce(expected, "sum", world)),
        lambda: out.copy_(functional.all_gather_tensor(expected, 0, world)),
    ]
    for call in calls:
        out.zero_()
        call()
        assert torch.equal(out, expected)
    dist.all_gather(outs, expected)
    assert torch.equal(outs[0], expected)
    dist.gather(expected, outs, 0)
    found: list[Any] = [None]
    dist.all_gather_object(found, {"x": 1})
    assert found == [{"x": 1}]
    dist.barrier()
    work = dist.all_reduce(out.copy_(expected), async_op=True)
    work.get_future().wait()
    assert torch.equal(out, expected)
    for done in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, expected, 0), dist.P2POp(dist.irecv, out.zero_(), 0)]
    ):
        done.wait()
    assert torch.equal(out, expected)
    with dist._coalescing_manager(world, out.device, async_ops=True) as manager:
        dist.all_reduce(out)
        dist.all_reduce(outs[0])
    manager.wait()
    torch.cuda.synchronize()
    assert torch.equal(out, outs[0])
    counted = native.counters(world)
    assert counted is not None
    assert counted.issued >= 15


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_bound_on_a_busy_device(start: Start, limit: int) -> None:
    world = start(limit)
    matrix = torch.randn(4096, 4096, device="cuda")
    tensors = []
    for number in range(16):
        matrix = (matrix @ matrix).clamp_(-1, 1)
        tensor = torch.full((1024,), float(number), device="cuda").add_(matrix[0, 0] * 0)
        dist.all_reduce(tensor, async_op=True)
        tensors.append(tensor)
    torch.cuda.synchronize()
    assert [t[0].item() for t in tensors] == list(range(16))
    counted = native.counters(world)
    assert counted is not None
    assert counted.max_in_flight <= limit
    assert counted.waited >= 16 - limit - 2
    assert counted.waited_s > 0


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to("cuda", torch.float64)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.linspace(-1, 1, 48, device="cuda", dtype=torch.float64).reshape(8, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def test_wrappers(start: Start, tmp_path: Path) -> None:
    start(2)
    reference = make_model()
    train(reference)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    sharded = make_model()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = DistributedDataParallel(make_model(), bucket_cap_mb=0.0001)  # type: ignore[arg-type]
    split = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for model in (sharded, replicated, split):
        train(model)
        for found, expected in zip(whole(model), whole(reference), strict=True):
            torch.testing.assert_close(found, expected)
    checkpoint.save(sharded.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    loaded = copy.deepcopy(sharded.state_dict())
    for tensor in loaded.values():
        tensor.zero_()
    checkpoint.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    for name, tensor in sharded.state_dict().items():
        torch.testing.assert_close(loaded[name].full_tensor(), tensor.full_tensor())


def test_split_and_groups_by_name(start: Start) -> None:
    world = start(3)
    groups = [dist.new_group(backend="smp"), dist.new_group()]
    if world.bound_device_id is not None:
        split = dist.split_group(world, [[0]])
        assert split is not None
        groups.append(split)
    for group in groups:
        dist.all_reduce(value(), group=group)
        counted = native.counters(group)
        assert counted is not None
        assert counted.issued == 1


def test_group_beside_a_plain_world(start: Start) -> None:
    world = start(3, backend="nccl")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = dist.new_group(backend="smp", pg_options=options, timeout=timedelta(seconds=33))
    dist.all_reduce(value(), group=group)
    dist.all_reduce(value(), group=world)
    assert native.counters(world) is None
    assert inner_of(group).options.is_high_priority_stream
    assert inner_of(group).options._timeout == timedelta(seconds=33)
    assert native.bounded_backend("nccl") == "smp"
    assert native.bounded_backend("gloo") == "smp_gloo"


def test_gloo_with_a_bound_beside_nccl(start: Start) -> None:
    start(3)
    group = dist.new_group(backend="smp_gloo")
    for tensor in (torch.ones(3), torch.ones(3, device="cuda")):
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0] * 3


def test_graph_capture_is_left_alone(start: Start) -> None:
    start(1)
    tensor = value()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            tensor.add_(1)
            dist.all_reduce(tensor)
    before = tensor.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensor, before + 4)


def test_sequence_numbers_timeouts_and_recorder(start: Start) -> None:
    world = start(2)
    backend = world._get_backend(torch.device("cuda"))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(value())
    assert backend._get_sequence_number_for_group() == before + 1
    world.set_timeout(timedelta(seconds=11))
    assert inner_of(world).options._timeout == timedelta(seconds=11)
    assert "all_reduce" in str(torch._C._distributed_c10d._dump_nccl_trace_json())


def test_abort(start: Start) -> None:
    start(1)
    dist.all_reduce(value())
    torch.cuda.synchronize()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
