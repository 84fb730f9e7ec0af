"""Hugging Face's Trainer through the old import: it trains, evaluates, saves and resumes."""

from __future__ import annotations

import gc
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
COMMON = ["--max-steps", "6", "--save-steps", "3"]

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers") is None,
    reason="the Trainer needs transformers and accelerate",
)


def example(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = runpy.run_path(str(EXAMPLE))["main"]([*COMMON, *arguments])
    gc.collect()  # one distributed model per process: the first must be gone
    return report


def two_stages(rank: int, world_size: int, folder: str) -> list[Any]:
    """Trains to the end; then again from the checkpoint in the middle."""
    from lightning_smp import barrier

    whole = example("--output", folder)
    barrier()
    if rank == 0:
        shutil.rmtree(f"{folder}/checkpoint-6")
    barrier()
    return [whole, example("--output", folder, "--resume")]


def two_replicas(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return example(
        "--output", folder, "--partitions", "1", "--batch-size", "8", "--num-microbatches", "1"
    )


def plain(rank: int, world_size: int, folder: str, smp_folder: str) -> dict[str, Any]:
    """One device, without this library, which reads the pipeline's checkpoint as well."""
    from transformers import GPT2LMHeadModel

    report = example("--output", folder, "--plain")
    mine, other = (
        GPT2LMHeadModel.from_pretrained(f"{path}/checkpoint-3").state_dict()
        for path in (folder, smp_folder)
    )
    assert mine.keys() == other.keys()
    report["distance"] = max(float((mine[name] - other[name]).abs().max()) for name in mine)
    return report


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("stages", "replicas", "plain")]
    stages = run_ranks(two_stages, 2, folders[0], timeout=100)
    replicas = run_ranks(two_replicas, 2, folders[1], timeout=100)
    [alone] = run_ranks(plain, 1, folders[2], folders[0], timeout=100)
    return {"stages": stages, "replicas": replicas, "plain": alone}


@pytest.mark.timeout(300)
def test_pipeline_trains_as_one_device(runs: dict[str, Any]) -> None:
    expected = runs["plain"]
    assert expected["losses"][-1] < expected["losses"][0] - 0.2
    for whole, _ in runs["stages"]:
        assert whole["step"] == 6
        for key in ("losses", "norms", "eval_loss"):
            assert whole[key] == pytest.approx(expected[key], rel=2e-3), key
    assert expected["distance"] < 1e-4


@pytest.mark.timeout(300)
def test_resumed_run_ends_as_the_whole_one(runs: dict[str, Any]) -> None:
    for whole, resumed in runs["stages"]:
        assert resumed["step"] == 6
        assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)


@pytest.mark.timeout(300)
def test_replicas_share_the_batches(runs: dict[str, Any]) -> None:
    for report in runs["replicas"]:
        for key in ("losses", "norms", "eval_loss"):
            assert report[key] == pytest.approx(runs["plain"][key], rel=2e-3), key
