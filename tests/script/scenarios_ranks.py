"""Ranks, groups and messages, as a scenario."""

from __future__ import annotations

import pytest
import torch

import lightning_smp as smp

__all__ = ["ranks_and_messages"]


def ranks_and_messages() -> None:
    """Ranks, groups, messages and barriers of four ranks in two stages, spread."""
    rank = smp.rank()
    assert (smp.size(), smp.pp_size(), smp.dp_size(), smp.mp_size(), smp.tp_size()) == (
        4,
        2,
        2,
        2,
        1,
    )
    assert (smp.pp_rank(), smp.dp_rank(), smp.mp_rank()) == (rank // 2, rank % 2, rank // 2)
    assert (smp.rdp_rank(), smp.tp_rank(), smp.local_rank()) == (rank % 2, 0, rank)
    assert (smp.rdp_size(), smp.local_size()) == (2, 4)
    assert smp.get_dp_group() == smp.get_rdp_group() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert smp.get_mp_group() == smp.get_pp_group() == [rank % 2, rank % 2 + 2]
    assert smp.get_world_group() == [0, 1, 2, 3]
    assert smp.get_tp_group() == [rank]
    for name in ("dp", "mp", "pp", "rdp", "tp", "world"):
        group = getattr(smp, f"get_{name}_process_group")()
        members = torch.distributed.get_process_group_ranks(group)
        assert members == getattr(smp, f"get_{name}_group")()
    assert smp.is_initialized()
    assert smp.num_microbatches() == 2
    assert smp.state.cfg.partitions == 2
    assert smp.DP_GROUP is smp.CommGroup.DP_GROUP

    data = {"rank": rank, "tensor": torch.full((3,), float(rank)), "big": [bytes(9000), None, (1,)]}
    assert [part["rank"] for part in smp.allgather(data)] == [0, 1, 2, 3]
    gathered = smp.allgather(data["tensor"], smp.CommGroup.DP_GROUP)
    assert [int(t[0]) for t in gathered] == smp.get_dp_group()
    assert [p["rank"] for p in smp.allgather(data, smp.MP_GROUP)] == smp.get_mp_group()
    if smp.pp_rank() == 0:
        smp.send(data, 1, smp.RankType.PP_RANK)
        smp.broadcast("all", smp.PP_GROUP)
    else:
        assert smp.recv_from(0, smp.PP_RANK)["rank"] == rank - 2
        assert smp.recv_from(0, smp.MP_RANK) == "all"
    if rank == 3:
        smp.broadcast({"world": True}, smp.WORLD)
    else:
        assert smp.recv_from(3, smp.WORLD_RANK) == {"world": True}
    with pytest.raises(smp.ConfigError, match="another one of the 2 ranks"):
        smp.send(1, smp.pp_rank(), smp.PP_RANK)
    with pytest.raises(smp.ConfigError, match=r"use one of smp\.CommGroup\.WORLD"):
        smp.allgather(1, "dp")
    with pytest.raises(TypeError, match="Cannot send"):
        smp.allgather(object())
    for wait in (smp.barrier, smp.mp_barrier, smp.dp_barrier, smp.pp_barrier):
        wait()
    for wait in (smp.tp_barrier, smp.rdp_barrier):
        wait()
    smp.barrier(smp.DP_GROUP)
    smp.init()  # changes nothing
    with pytest.raises(smp.ConfigError, match="another configuration"):
        smp.init({"microbatches": 3})
