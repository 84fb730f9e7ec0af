"""`examples/smp_script.py`, a port of a typical script, in all its layouts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "smp_script.py"
COMMON = ["--no-shuffle", "--dropout", "0", "--max-steps", "4", "--gamma", "1"]
STEPS = 4


def example(rank: int, world_size: int, *arguments: str) -> dict[str, Any]:
    main = runpy.run_path(str(EXAMPLE))["main"]
    report: dict[str, Any] = main([*COMMON, *arguments])
    return report


def reports(stages: int, replicas: int = 1, *arguments: str, epochs: int = 2) -> list[Any]:
    layout = ["--partitions", str(stages), "--batch-size", str(64 // replicas)]
    return run_ranks(
        example, stages * replicas, *layout, "--epochs", str(epochs), *arguments, timeout=90
    )


def one_curve(results: list[Any], stages: int) -> list[float]:
    """The loss curve, equal on all ranks of a model group and averaged over replicas."""
    groups = [results[start : start + stages] for start in range(0, len(results), stages)]
    for group in groups:
        assert all(report == group[0] for report in group), "ranks of a model group differ"
    curves = [group[0]["losses"] for group in groups]
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One device: two epochs, with the state after the first saved."""
    path = str(tmp_path_factory.mktemp("reference") / "whole.pt")
    [first] = reports(1, 1, "--save-full", path, epochs=1)
    [both] = reports(1)
    assert both["losses"][:STEPS] == first["losses"]
    assert both["losses"][-1] < 0.97 * both["losses"][0]
    return {**both, "path": path}


@pytest.mark.parametrize(
    ("stages", "replicas", "pipeline"),
    [(2, 1, "simple"), (2, 2, "interleaved"), (4, 1, "interleaved")],
)
def test_losses_are_those_of_one_device(
    stages: int, replicas: int, pipeline: str, reference: dict[str, Any]
) -> None:
    results = reports(stages, replicas, "--pipeline", pipeline)
    assert one_curve(results, stages) == pytest.approx(reference["losses"], rel=1e-4)
    for report in results:
        assert report["test"]["accuracy"] == pytest.approx(reference["test"]["accuracy"], abs=0.01)
        assert report["test"]["loss"] == pytest.approx(reference["test"]["loss"], rel=1e-3)


def test_partial_checkpoint_goes_on_in_every_layout(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    path = str(tmp_path / "part.pt")
    reports(2, 2, "--save-partial", path, epochs=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part.pt_0", "part.pt_1"]
    for stages in (2, 4):
        results = reports(stages, 1, "--load-partial", path, epochs=1)
        expected = reference["losses"][STEPS:]
        assert one_curve(results, stages) == pytest.approx(expected, rel=1e-4)


def test_full_checkpoint_of_one_device_and_back(tmp_path: Path, reference: dict[str, Any]) -> None:
    path = str(tmp_path / "whole.pt")
    results = reports(
        2, 1, "--load-full", reference["path"], "--save-full", path, epochs=1
    )  # fmt: skip
    assert one_curve(results, 2) == pytest.approx(reference["losses"][STEPS:], rel=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["whole.pt"]
    [after] = reports(1, 1, "--load-full", path, epochs=1)
    assert after["losses"][0] < reference["losses"][STEPS]


def old_import(rank: int, world_size: int, script: str, report: str) -> None:
    """What `python -m lightning_smp.run script` does, with the argument that SageMaker adds."""
    from lightning_smp.run import main

    layout = "partitions=2,microbatches=4,ddp=True"
    arguments = ["--partitions", "1", "--batch-size", "64", "--epochs", "2", "--report", report]
    main([script, *COMMON, *arguments, "--mp_parameters", layout])


def test_the_old_import(tmp_path: Path, reference: dict[str, Any]) -> None:
    text, new = EXAMPLE.read_text(), "import lightning_smp as smp"
    assert text.count(f"\n{new}\n") == 1
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    text = text.replace(new, "import smdistributed.modelparallel.torch as smp")
    with_cuda = text.replace("use_cuda = torch.cuda.is_available()", "use_cuda = True")
    assert with_cuda != text
    script.write_text(with_cuda)
    run_ranks(old_import, 2, str(script), str(report))
    losses = json.loads(report.read_text())["losses"]
    assert losses == pytest.approx(reference["losses"], rel=1e-4)


def test_amp(reference: dict[str, Any]) -> None:
    results = reports(2, 1, "--amp")
    curve = one_curve(results, 2)
    assert curve != reference["losses"]
    assert curve == pytest.approx(reference["losses"], rel=0.05)
