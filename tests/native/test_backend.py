"""The backend "smp" on two gloo ranks: all that runs on a process group, with and without bound."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lightning_smp.native.backend as native
from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.groups import Groups
from lightning_smp.native import load_backend
from lightning_smp.topology import Topology
from tests.native.built import backend_module
from tests.support.launch import run_ranks

SIZE = 2
F64 = torch.float64


@contextmanager
def smp_world(backend: str = "smp", timeout_s: float = 30) -> Iterator[dist.ProcessGroup]:
    native.register()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def check_collectives(rank: int, group: dist.ProcessGroup) -> None:
    other = 1 - rank
    mine = torch.arange(4.0) + 10 * rank
    both = [torch.arange(4.0), torch.arange(4.0) + 10]

    def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    value = mine.clone()
    dist.all_reduce(value)
    equal(value, both[0] + both[1])
    dist.all_reduce(value := mine.clone(), dist.ReduceOp.MAX)
    equal(value, both[1])
    dist.broadcast(value := mine.clone(), 1)
    equal(value, both[1])
    dist.reduce(value := mine.clone(), 0)
    if rank == 0:
        equal(value, both[0] + both[1])
    parts = [torch.empty(4) for _ in both]
    dist.all_gather(parts, mine)
    equal(torch.stack(parts), torch.stack(both))
    dist.all_gather_into_tensor(flat := torch.empty(8), mine)
    equal(flat, torch.cat(both))
    dist.gather(mine, parts if rank == 0 else None, 0)
    dist.scatter(value := torch.empty(4), both if rank == 0 else None, 0)
    equal(value, both[rank])
    dist.reduce_scatter(half := torch.empty(2), list(mine.clone().chunk(2)))
    equal(half, (both[0] + both[1]).chunk(2)[rank])
    dist.reduce_scatter_tensor(half := torch.empty(2), mine.clone())
    equal(half, (both[0] + both[1]).chunk(2)[rank])
    dist.all_to_all_single(value := torch.empty(4), mine)
    equal(value, torch.cat([part.chunk(2)[rank] for part in both]))
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=20))
    objects: list[Any] = [{"rank": 0}, {"rank": 1}]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, objects[rank])
    assert found == objects
    send = dist.isend(mine, other)
    dist.recv(value := torch.empty(4), other)
    send.wait()
    equal(value, both[other])
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, value.zero_(), other)]
    )
    for work in works:
        work.wait()
    equal(value, both[other])


def check_async(rank: int) -> None:
    values = [torch.full((1000,), float(rank + k)) for k in range(24)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    for k, (work, value) in enumerate(zip(works, values, strict=True)):
        future = work.get_future()
        work.wait()
        future.wait()
        assert work.is_completed()
        assert value.unique().tolist() == [2.0 * k + 1]
    # Waiting twice does not copy the result over what the buffer holds by now.
    out = torch.empty(2)
    work = dist.reduce_scatter_tensor(out, torch.ones(4), async_op=True)
    work.wait()
    assert out.tolist() == [2.0, 2.0]
    out.fill_(7)
    if native.throttle_limit() > 0:
        work.wait()
        assert out.tolist() == [7.0, 7.0]


def check_point_to_point_between_collectives(rank: int) -> None:
    """Each rank's receive comes after its send and a collective: a held back send would hang."""
    other = 1 - rank
    sends = [dist.isend(torch.tensor([float(k)]), other) for k in range(12)]
    value = torch.tensor([float(rank)])
    work = dist.all_reduce(value, async_op=True)
    received = [torch.empty(1) for _ in sends]
    for tensor in received:
        dist.recv(tensor, other)
    for send in sends:
        send.wait()
    work.wait()
    assert [t.item() for t in received] == list(range(12))


def check_functional(rank: int, group: dist.ProcessGroup) -> None:
    mine = torch.arange(4.0) + 10 * rank
    total = functional.all_reduce(mine, "sum", group)
    assert total.tolist() == [10.0, 12.0, 14.0, 16.0]
    gathered = functional.all_gather_tensor(mine, 0, group)
    assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    half = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    assert half.tolist() == ([10.0, 12.0] if rank == 0 else [14.0, 16.0])
    leaf = torch.ones(2, requires_grad=True)
    functional.all_gather_tensor_autograd(leaf, 0, group).mul(rank + 1.0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        pair = [torch.full((2,), float(rank)), torch.full((2,), float(rank + 1))]
        for tensor in pair:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.tolist() for t in pair] == [[1.0, 1.0], [3.0, 3.0]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(F64)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(8, 6, generator=generator, dtype=F64),
        torch.randn(8, 4, generator=generator, dtype=F64),
    )


def train(
    model: nn.Module,
    rows: slice,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.1),
) -> None:
    x, y = batch()
    optimizer = make_optimizer(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


def same_weights(found: nn.Module, expected: nn.Module) -> None:
    for (name, value), wanted in zip(found.named_parameters(), expected.parameters(), strict=True):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(
            whole.detach(), wanted.detach(), msg=lambda m, n=name: f"{n} {m}"
        )


def check_wrappers(rank: int, folder: str) -> None:
    rows = slice(4 * rank, 4 * rank + 4)
    reference = make_model()
    train(reference, slice(0, 8))

    replicated = DistributedDataParallel(make_model(), bucket_cap_mb=0.0001)
    train(replicated, rows)
    same_weights(replicated.module, reference)

    zero = DistributedDataParallel(make_model())
    train(zero, rows, lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1))
    same_weights(zero.module, reference)

    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    sharded = make_model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, rows)
    same_weights(sharded, reference)

    path = Path(folder) / "checkpoint"
    checkpoint.save(sharded.state_dict(), checkpoint_id=path)
    loaded = copy.deepcopy(sharded.state_dict())
    for value in loaded.values():
        value.zero_()
    checkpoint.load(loaded, checkpoint_id=path)
    for name, value in sharded.state_dict().items():
        torch.testing.assert_close(loaded[name].full_tensor(), value.full_tensor())

    split = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(split, slice(0, 8))
    same_weights(split, reference)

    spread = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    assert spread.full_tensor().sum().item() == 28.0


def run_all(rank: int, world_size: int, folder: str) -> None:
    limit = native.throttle_limit()
    with smp_world() as world:
        check_collectives(rank, world)
        check_async(rank)
        check_point_to_point_between_collectives(rank)
        check_functional(rank, world)
        check_wrappers(rank, folder)
        found = native.counters(world)
        assert found is not None
        assert found.issued > 100
        assert found.max_in_flight == 0 if limit < 0 else 0 < found.max_in_flight <= limit
        backend = world._get_backend(torch.device("cpu"))
        before = backend._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        assert backend._get_sequence_number_for_group() == before + 1


@pytest.mark.timeout(110)
@pytest.mark.parametrize("limit", ["-1", "1", "3", ""])
def test_everything_on_two_ranks(limit: str, tmp_path: Path) -> None:
    backend_module()
    run_ranks(run_all, SIZE, str(tmp_path), env={"SMP_NCCL_THROTTLE_LIMIT": limit}, timeout=100)


def under_the_checker(rank: int, world_size: int) -> None:
    with smp_world() as world:
        check_collectives(rank, world)
        found = native.counters(world)
        assert found is not None
        assert found.issued > 10


def test_works_under_torch_own_checker() -> None:
    backend_module()
    run_ranks(under_the_checker, SIZE, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def groups_by_name(rank: int, world_size: int) -> None:
    with smp_world("gloo"):
        throttled = dist.new_group(backend="smp", timeout=timedelta(seconds=20))
        also = dist.new_group(backend="smp_gloo")
        mesh = init_device_mesh(
            "cpu", (SIZE,), mesh_dim_names=("dp",), backend_override={"dp": "smp"}
        )
        for group in (throttled, also, mesh.get_group()):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == SIZE
            found = native.counters(group)
            assert found is not None
            assert found.issued >= 1
        assert native.counters(dist.group.WORLD) is None  # type: ignore[arg-type]
        inner = throttled._get_backend(torch.device("cpu")).inner
        assert inner.options._timeout == timedelta(seconds=20)
        throttled.set_timeout(timedelta(seconds=9))
        assert inner.options._timeout == timedelta(seconds=9)
        with pytest.raises(ConfigError, match="pg_options of type int"):
            dist.new_group(backend="smp", pg_options=3)


def test_groups_by_name() -> None:
    backend_module()
    run_ranks(groups_by_name, SIZE)


def times_out(rank: int, world_size: int) -> None:
    native.register()
    dist.init_process_group("smp", timeout=timedelta(seconds=1))
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1))  # must wait for the first, which nobody joins
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done{rank}", "1")
    store.wait(["done0", "done1"], timedelta(seconds=20))


def test_wait_for_room_ends_with_the_timeout() -> None:
    backend_module()
    run_ranks(times_out, SIZE, env={"SMP_NCCL_THROTTLE_LIMIT": "1"})


def library_groups(rank: int, world_size: int, degrees: dict[str, int]) -> list[str]:
    with smp_world("gloo"):
        topology = Topology.from_world(world_size, **degrees)
        groups = Groups.build(topology, rank, "gloo", timedelta(seconds=20))
        named = {axis: dist.get_backend(getattr(groups, axis)) for axis in ("pp", "dp", "tp")}
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("lightning_smp.native.backend")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        dist.all_reduce(torch.ones(1), group=groups.dp)
        groups.close()
        dist.barrier()
        return [*(f"{axis}:{name}" for axis, name in named.items()), *records]


@pytest.mark.parametrize(
    ("degrees", "bounded"),
    [({"pipeline": 1}, ["dp"]), ({"tensor": 2}, ["dp", "tp"]), ({"pipeline": 2}, [])],
    ids=str,
)
def test_library_bounds_its_reducing_groups(degrees: dict[str, int], bounded: list[str]) -> None:
    backend_module()
    for found in run_ranks(library_groups, SIZE, degrees):
        for axis in ("pp", "dp", "tp"):
            assert f"{axis}:{'smp' if axis in bounded else 'gloo'}" in found
        logged = [record for record in found if "throttle of group smp_dp" in record]
        assert len(logged) == bool(bounded)
        assert all("Counters(issued=1, waited=0" in record for record in logged)


@pytest.mark.parametrize("variable", ["SMP_NCCL_THROTTLE_LIMIT", "LIGHTNING_SMP_NATIVE"])
def test_library_uses_plain_groups_where_the_bound_is_off(variable: str) -> None:
    env = {variable: "-1" if "LIMIT" in variable else "0"}
    for found in run_ranks(library_groups, SIZE, {"pipeline": 1}, env=env):
        assert "dp:gloo" in found


def only_one_rank_has_it(rank: int, world_size: int) -> str:
    if rank == 1:
        load_backend.cache_clear()
        import os

        os.environ["LIGHTNING_SMP_NATIVE"] = "0"
    with smp_world("gloo"):
        groups = Groups.build(Topology.from_world(2), rank, "gloo", timedelta(seconds=20))
        return dist.get_backend(groups.dp)


def test_ranks_agree_where_only_one_has_the_library() -> None:
    assert run_ranks(only_one_rank_has_it, SIZE) == ["gloo", "gloo"]


def asks_without_library(rank: int, world_size: int) -> None:
    native.register()
    with pytest.raises(UnsupportedError, match="LIGHTNING_SMP_NATIVE=0"):
        dist.init_process_group("smp")


def test_name_is_refused_without_the_library() -> None:
    run_ranks(asks_without_library, 1, env={"LIGHTNING_SMP_NATIVE": "0"})
