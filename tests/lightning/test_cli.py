"""LightningCLI chooses the strategy by name, by class path and in YAML, in both namespaces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.lightning.test_launch import _run as run_program
from tests.support.launch import run_ranks

pytestmark = pytest.mark.timeout(200)

_TIMEOUT_S = 120
_TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
_YAML = """
seed_everything: 1
trainer:
  strategy:
    class_path: {path}
    init_args:
      pipeline_parallel_degree: 2
      microbatches: 2
      pipeline: simple
      tied_parameters: together
      config: {{active_microbatches: 2}}
optimizer:
  class_path: torch.optim.SGD
  init_args: {{lr: 0.1, momentum: 0.9}}
"""
_PROGRAM = """
import {namespace}.cli
from {namespace}.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    cli = {namespace}.cli.LightningCLI(BoringModel, BoringDataModule, save_config_callback=None)
    strategy = cli.trainer.strategy
    print(type(strategy).__name__, cli.trainer.global_rank, strategy.groups.pp_size, flush=True)
"""


def _cli(rank: int, world_size: int, namespace: str, arguments: list[str]) -> dict[str, Any]:
    """Runs ``fit`` with arguments; returns what the strategy was made with."""
    import importlib

    import lightning_smp  # noqa: F401 - registers "smp", as the entry point does after installation

    cli = importlib.import_module(f"{namespace}.cli").LightningCLI
    demos = importlib.import_module(f"{namespace}.demos.boring_classes")

    class Data(demos.BoringDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(demos.RandomDataset(32, 64), batch_size=4)

    trainer = cli(
        demos.BoringModel,
        Data,
        save_config_callback=None,
        args=["fit", *_TRAINER, *arguments],
    ).trainer
    config = trainer.strategy.config
    return {
        "class": f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__name__}",
        "pp": config.pipeline_parallel_degree,
        "microbatches": config.microbatches,
        "pipeline": config.pipeline,
        "active": config.active_microbatches,
        "steps": trainer.global_step,
        "optimizer": type(trainer.optimizers[0]).__name__,
    }


def _agreed(namespace: str, arguments: list[str]) -> dict[str, Any]:
    first, second = run_ranks(_cli, 2, namespace, arguments, timeout=_TIMEOUT_S)
    assert first == second
    assert first["steps"] == 2
    return dict(first)


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_name(namespace: str) -> None:
    found = _agreed(namespace, ["--trainer.strategy=smp"])
    assert found["pp"] == 1
    assert found["class"].endswith("SMPStrategy")


def test_class_path_with_arguments() -> None:
    found = _agreed(
        "lightning.pytorch",
        [
            "--trainer.strategy=lightning_smp.SMPStrategy",
            "--trainer.strategy.pipeline_parallel_degree=2",
            "--trainer.strategy.microbatches=2",
            "--optimizer=Adam",
        ],
    )
    assert (found["pp"], found["microbatches"], found["optimizer"]) == (2, 2, "Adam")


@pytest.mark.parametrize(
    ("namespace", "path"),
    [
        ("lightning.pytorch", "lightning_smp.SMPStrategy"),
        ("pytorch_lightning", "lightning_smp.pytorch_lightning.SMPStrategy"),
    ],
)
def test_yaml(namespace: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(_YAML.format(path=path))
    found = _agreed(namespace, [f"--config={file}"])
    assert found == {
        "class": path,
        "pp": 2,
        "microbatches": 2,
        "pipeline": "simple",
        "active": 2,
        "steps": 2,
        "optimizer": "SGD",
    }


def test_program_under_lightnings_launcher(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(namespace="lightning.pytorch"))
    ended = run_program(
        [
            *(sys.executable, str(program), "fit", *_TRAINER),
            "--trainer.strategy=lightning_smp.SMPStrategy",
            "--trainer.strategy.pipeline_parallel_degree=2",
        ],
        tmp_path,
    )
    assert ended.code == 0, ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("SMPStrategy")]
    assert sorted(lines) == ["SMPStrategy 0 2", "SMPStrategy 1 2"]
