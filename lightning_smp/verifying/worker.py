"""One process of a verification: trains by the job's file and leaves its result beside it.

`python -m lightning_smp.verifying.worker FOLDER`, once alone (the reference) and once in each
process of the layout.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_smp.errors import ConfigError
from lightning_smp.placed.structure import map_tensors
from lightning_smp.verifying.job import Job, find
from lightning_smp.verifying.one_device import OneDevice
from lightning_smp.verifying.probes import Probes

__all__ = ["main", "train"]


def main(folder: Path) -> None:
    """Trains and writes ``reference.pt`` or ``rank_N.pt``."""
    job = Job.read(folder)
    sys.path[:0] = [place for place in job.path if place not in sys.path]
    is_reference = "RANK" not in os.environ
    result = train(job, is_reference=is_reference)
    name = "reference.pt" if is_reference else f"rank_{os.environ['RANK']}.pt"
    torch.save(result, folder / name)


def train(job: Job, *, is_reference: bool) -> dict[str, Any]:
    """What a few steps gave: losses, calls of units, gradients and weights, as plain data."""
    pl.seed_everything(job.seed, verbose=False)
    module = find(job.module)()
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(f"{job.module} made a {type(module).__name__}, not a LightningModule.")
    replicas = _replicas(job)
    needed = job.steps * replicas
    batches = _batches(job, module, needed)
    if job.double:
        module.double()
        batches = [map_tensors(batch, _double) for batch in batches]
    probes = Probes()
    probes.install(module)
    recorder = _Recorder(probes)
    strategy = _strategy(job, probes, is_reference=is_reference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            strategy=strategy, accelerator=job.accelerator, logger=False, callbacks=[recorder],
            devices=1 if is_reference else job.world_size, max_steps=job.steps, max_epochs=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0,
        )  # fmt: skip
        pl.seed_everything(job.seed, verbose=False)
        loader = _Fixed(batches, replicas, None if is_reference else strategy)
        trainer.fit(module, loader)
    result = recorder.result
    result["probes"] = probes.seen
    if is_reference:
        result["losses"] = strategy.losses
    else:
        result["replica"] = strategy.groups.dp_rank
    return result


def _replicas(job: Job) -> int:
    from lightning_smp.config import resolve_config

    topology = resolve_config(job.config, {}).topology(job.world_size)
    return topology.dp_size


def _strategy(job: Job, probes: Probes, *, is_reference: bool) -> Any:
    from lightning_smp import SMPStrategy

    if not is_reference:
        return SMPStrategy(config=job.config)
    device = torch.device("cpu" if job.accelerator == "cpu" else "cuda:0")
    count = SMPStrategy(config=job.config).config.microbatches
    return OneDevice(device, probes, microbatches=count, seed=job.seed)


def _batches(job: Job, module: pl.LightningModule, count: int) -> list[Any]:
    """The first batches of the user's loader, equal in every process."""
    source: Any = find(job.data)() if job.data else module
    if isinstance(source, pl.LightningDataModule):
        source.prepare_data()
        source.setup("fit")
    loader = source.train_dataloader() if hasattr(source, "train_dataloader") else source
    found = [batch for batch, _ in zip(loader, range(count), strict=False)]
    if len(found) < count:
        raise ConfigError(
            f"the training data has {len(found)} batches, and the layout takes {count} (steps x "
            f"replicas). Give more data or fewer steps (steps={job.steps})."
        )
    return found


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _Fixed:
    """The batches of one replica, or for the reference those of all replicas together."""

    def __init__(self, batches: list[Any], replicas: int, strategy: Any) -> None:
        self._rounds = [batches[k : k + replicas] for k in range(0, len(batches), replicas)]
        self._strategy = strategy

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Any]:
        for together in self._rounds:
            alone = self._strategy is not None
            yield together[self._strategy.groups.dp_rank] if alone else together


class _Recorder(pl.Callback):
    """Collects losses, the first gradients and the last weights."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self.result: dict[str, Any] = {
            "losses": [], "loss_dtype": "", "gradients": {}, "weights": {}
        }  # fmt: skip

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Says whose samples the units of this process see."""
        self._probes.replica = getattr(getattr(trainer.strategy, "groups", None), "dp_rank", 0)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keeps the gradients of the first step; afterwards calls are no longer noted."""
        if not self._probes.active:
            return
        self._probes.active = False
        self.result["parameters"] = [name for name, _ in pl_module.named_parameters()]
        self.result["gradients"] = {
            name: parameter.grad.detach().cpu().clone()
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None
        }

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.result["losses"].append(float(loss))
        self.result["loss_dtype"] = str(loss.dtype)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps the weights, whole on rank 0."""
        state = trainer.strategy.lightning_module_state_dict()
        self.result["weights"] = {
            name: value.detach().cpu().clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
