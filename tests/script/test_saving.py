"""`smp.save` and `smp.load`: who writes which file, and what every layout reads of it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_smp as smp
from lightning_smp.errors import CheckpointError, ConfigError
from tests.script.world import start
from tests.support.launch import gloo_group, run_ranks

PARTIAL = "_smp_is_partial"


def part_of(stage: int) -> dict[str, Any]:
    groups = [{"params": [0, 1], "lr": 0.1}]
    return {
        "model": {f"w{stage}": torch.full((2,), float(stage)), PARTIAL: True},
        "optimizer": {"state": {stage: {"step": stage}}, "param_groups": groups, PARTIAL: True},
        "epoch": 3,
    }


def save_everything(folder: str) -> None:
    """With two stages and two replicas; every rank is told to write every file."""
    rank, stage = smp.rank(), smp.pp_rank()
    smp.save({**part_of(stage), "rank": rank}, f"{folder}/part", partial=True)
    smp.save({"rank": rank}, f"{folder}/plain")
    smp.save({"rank": rank}, f"{folder}/whole", partial=False)
    smp.save({"rank": rank}, f"{folder}/each", partial=True, v3=True)
    dist.barrier()


def whole_is_right(found: dict[str, Any]) -> None:
    assert found["epoch"] == 3
    assert found["model"][PARTIAL] is found["optimizer"][PARTIAL] is False
    assert {k: v.tolist() for k, v in found["model"].items() if k != PARTIAL} == {
        "w0": [0.0, 0.0], "w1": [1.0, 1.0],
    }  # fmt: skip
    assert found["optimizer"]["state"] == {0: {"step": 0}, 1: {"step": 1}}


def files(rank: int, world_size: int, folder: str) -> None:
    with gloo_group():
        start(pipeline_parallel_degree=2, ddp=True)
        save_everything(folder)
        writer = smp.get_pp_group().index(rank)  # rdp_rank 0 has the same stage
        found = smp.load(f"{folder}/part", partial=True)
        assert sorted(found) == ["epoch", "model", "optimizer", "rank"]
        assert found.pop("rank") == writer
        expected = part_of(smp.pp_rank())
        torch.testing.assert_close(found, expected)
        assert smp.load(f"{folder}/plain") == {"rank": writer}
        assert smp.load(f"{folder}/whole", partial=False) == {"rank": 0}
        assert smp.load(f"{folder}/each", partial=True, back_compat=True) == {"rank": rank}
        for stages in (4, 1):
            start(pipeline_parallel_degree=stages, ddp=True)
            whole_is_right(smp.load(f"{folder}/part", partial=True, map_location="cpu"))
        start(pipeline_parallel_degree=4, ddp=True)
        if rank > 1:
            with pytest.raises(CheckpointError, match="no file for this rank"):
                smp.load(f"{folder}/plain")
        dist.barrier()
        if rank == 0:
            Path(f"{folder}/part_1").unlink()
            with pytest.raises(CheckpointError, match="part_1"):
                smp.load(f"{folder}/part")


def test_files_of_two_stages_and_two_replicas(tmp_path: Path) -> None:
    run_ranks(files, 4, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "each_0_0_0", "each_0_0_1", "each_1_0_0", "each_1_0_1",
        "part_0", "plain_0", "plain_1", "whole",
    ]  # fmt: skip


def alone(rank: int, world_size: int, folder: str) -> None:
    with gloo_group():
        start()
        path = f"{folder}/file"
        smp.save({"options": Namespace(lr=1)}, path, partial=False)
        with pytest.raises(CheckpointError, match="weights_only=False"):
            smp.load(path, partial=False)
        assert smp.load(path, partial=False, weights_only=False)["options"].lr == 1
        smp.save({"new": 1}, path, partial=False)
        with pytest.raises(Exception, match="lambda"):
            smp.save({"unsavable": lambda: 1}, path, partial=False)
        assert smp.load(path, partial=False) == {"new": 1}  # the former file is still there
        assert smp.load(path, None, __import__("pickle"), False) == {"new": 1}
        torch.save({"of": "torch"}, path)
        assert smp.load(path, partial=False) == {"of": "torch"}
        smp.save(torch.ones(2), f"{folder}/apart")
        with pytest.raises(CheckpointError, match=r"apart_0.*partial=True"):
            smp.load(f"{folder}/apart", partial=False)
        for call in (smp.save, smp.load):
            with pytest.raises(ConfigError, match="string"):
                call(*([1] * (call is smp.save)), Path(path))


def damaged(rank: int, world_size: int, folder: str) -> None:
    with gloo_group():
        start()
        path = f"{folder}/file"
        smp.save({"w": torch.ones(100)}, path, partial=False)
        whole = Path(path).read_bytes()
        for content in (whole[: len(whole) // 2], b"", b"no checkpoint at all\n" * 30, b"\x80\x02"):
            Path(path).write_bytes(content)
            for options in ({}, {"mmap": True}, {"weights_only": False}):
                with pytest.raises(CheckpointError, match=r"file' cannot be read .*damaged") as met:
                    smp.load(path, partial=False, **options)
                assert "weights_only" not in str(met.value)
        with pytest.raises(CheckpointError, match="cannot be read"):
            smp.load(folder, partial=False)
        torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
        assert smp.load(path, partial=False, mmap=True)["w"].tolist() == [1.0, 1.0]
        torch.save(Namespace(lr=1), path, _use_new_zipfile_serialization=False)
        with pytest.raises(CheckpointError, match="pass weights_only=False"):
            smp.load(path, partial=False, mmap=True)


def test_damaged_files_and_those_of_the_former_format(tmp_path: Path) -> None:
    run_ranks(damaged, 1, str(tmp_path))


def test_contents_and_errors(tmp_path: Path) -> None:
    run_ranks(alone, 1, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["apart_0", "file"]
