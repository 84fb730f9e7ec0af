"""Process groups made from a topology, on two and four gloo ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError, ConfigError
from lightning_smp.groups import Groups
from lightning_smp.topology import Topology
from tests.support.launch import gloo_group, run_ranks

AXES = ("pp", "tp", "rdp", "dp", "mp")
TIMEOUT = timedelta(seconds=30)


def _check_groups(rank: int, world_size: int, degrees: dict[str, Any]) -> None:
    with gloo_group():
        topology = Topology.from_world(world_size, **degrees)
        groups = Groups.build(topology, rank, "gloo", TIMEOUT)
        for axis in AXES:
            group = getattr(groups, axis)
            members = topology.group(axis, rank)  # type: ignore[arg-type]
            assert tuple(dist.get_process_group_ranks(group)) == members
            assert dist.get_rank(group) == getattr(groups, f"{axis}_rank")
            assert dist.get_world_size(group) == getattr(groups, f"{axis}_size")
            total = torch.tensor(rank)
            dist.all_reduce(total, group=group)
            assert total.item() == sum(members)
        assert groups.world_size == world_size
        assert groups.world is groups.world_control is dist.group.WORLD
        assert groups.control is groups.pp
        if groups.tp_size == 1:
            assert groups.pp is groups.mp
            assert groups.rdp is groups.dp
        groups.close()
        groups.close()
        dist.barrier()


def _check_close(rank: int, world_size: int) -> None:
    with gloo_group():
        groups = Groups.build(Topology.from_world(2), rank, "gloo", TIMEOUT)
        assert groups.dp is dist.group.WORLD
        single = groups.pp
        groups.close()
        dist.barrier(groups.dp)
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(single)
        again = Groups.build(Topology.from_world(2, pipeline=2), rank, "gloo", TIMEOUT)
        assert again.pp_rank == rank
    again.close()  # after the default group is gone: nothing left to destroy


def _check_refusals(rank: int, world_size: int) -> None:
    with pytest.raises(CommunicationError, match="init_process_group first"):
        Groups.build(Topology(1, 1, 2), rank, "gloo", TIMEOUT)
    with gloo_group():
        with pytest.raises(ConfigError, match=r"has 4 ranks .* has 2\. Use .*from_world\(2"):
            Groups.build(Topology(2, 1, 2), rank, "gloo", TIMEOUT)
        with pytest.raises(ConfigError, match="calls this rank"):
            Groups.build(Topology(1, 1, 2), 1 - rank, "gloo", TIMEOUT)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_two_ranks(pipeline: int) -> None:
    run_ranks(_check_groups, 2, {"pipeline": pipeline})


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 2},
        {"pipeline": 2, "placement": "spread"},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 4},
    ],
    ids=str,
)
def test_four_ranks(degrees: dict[str, Any]) -> None:
    run_ranks(_check_groups, 4, degrees)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("program", [_check_close, _check_refusals])
def test_life_of_the_groups(program: object) -> None:
    # Without a bound on its collectives a group of all ranks is the world itself.
    run_ranks(program, 2, env={"SMP_NCCL_THROTTLE_LIMIT": "-1"})  # type: ignore[arg-type]
