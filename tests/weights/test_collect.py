from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from lightning_smp.groups import Groups
from lightning_smp.topology import Topology
from lightning_smp.weights import collect as collect_module
from lightning_smp.weights.collect import PipelineLinks, collect
from tests.support.launch import gloo_group, run_ranks

_CPU = torch.device("cpu")


def _values(stage: int) -> dict[object, object]:
    base = torch.arange(12, dtype=torch.float64).reshape(3, 4) + stage
    return {
        ("big", stage): base,
        ("transposed", stage): base.t(),
        ("same", stage): base,
        ("bits", stage): torch.tensor([True, False]),
        ("complex", stage): torch.tensor(1 + 2j).conj(),
        ("empty", stage): torch.zeros(0, 2),
        ("scalar", stage): torch.tensor(3, dtype=torch.int8),
        ("plain", stage): {"a": [1, None, "text"]},
    }


def _collect(rank: int, world_size: int, piece_bytes: int) -> dict[object, object]:
    collect_module._PIECE_BYTES = piece_bytes  # this process only
    topology = Topology.from_world(world_size, pipeline=world_size // 2)
    with gloo_group():
        groups = Groups.build(topology, rank, "gloo", timedelta(seconds=20))
        links = PipelineLinks.over(groups, _CPU)
        assert links.ranks[links.pp_rank] == rank
        assert (links.writer_stage is None) == (0 not in links.ranks)
        found = collect(_values(links.pp_rank), links)
        for stage in range(1, topology.pp_size if found else 0):
            assert found["big", stage] is found["same", stage]
        groups.close()
        return found


@pytest.mark.parametrize("piece_bytes", [8, 2**20])
def test_writer_gets_everything_of_the_other_stages(piece_bytes: int) -> None:
    found, *others = run_ranks(_collect, 6, piece_bytes, timeout=60)
    assert not any(others)
    expected = _values(1) | _values(2)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype is value.dtype
            assert torch.equal(found[key], value)
        else:
            assert found[key] == value


def test_one_stage_has_nothing_to_collect() -> None:
    links = PipelineLinks(group=None, ranks=(0,), pp_rank=0, device=_CPU)
    assert collect(_values(0), links) == {}
