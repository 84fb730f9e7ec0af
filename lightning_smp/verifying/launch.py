"""Runs a verification: the reference in one process, the layout in several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_smp.config import resolve_config
from lightning_smp.errors import ConfigError, SMPError
from lightning_smp.verifying.job import Job, path_of
from lightning_smp.verifying.report import Report, compare

__all__ = ["verify"]

_WORKER = "lightning_smp.verifying.worker"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                   "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # fmt: skip
_TAIL = 3000
_REASONS = (
    r"^\[lightning_smp\] the first failure was (.*)",
    r"^\[lightning_smp\] failure (.*)",
)


def verify(
    module: Callable[[], Any] | str,
    data: Callable[[], Any] | str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    steps: int = 3,
    seed: int = 0,
    double: bool = False,
    accelerator: str = "cpu",
    tolerance: float | None = None,
    timeout: float = 600.0,
) -> Report:
    """Trains a few steps on one device and under a layout, and compares the two.

    Starts the processes itself; call it from one process.

    Args:
        module: makes the LightningModule, without arguments; a class or function that can be
            imported, or its path "package.module:name".
        data: makes a loader or LightningDataModule; by default the module's own loader.
        config: SMP configuration keys of the layout.
        world_size: processes; by default pipeline times tensor degree.
        steps: optimizer steps.
        seed: of all random generators.
        double: compute in float64, where a difference cannot hide in rounding.
        accelerator: "cpu", or "gpu" with one GPU for each process.
        tolerance: relative; by default by dtype, see `Report`.
        timeout: seconds for each of the two runs.

    Returns:
        What was compared, and the first unit that differs.

    Raises:
        ConfigError: the layout or the names cannot be used.
        SMPError: a run failed; its output is in the message.
    """
    resolved = resolve_config(dict(config or {}), {})
    model_ranks = resolved.pipeline_parallel_degree * resolved.tensor_parallel_degree
    size = model_ranks if world_size is None else world_size
    resolved.topology(size)
    if steps < 1:
        raise ConfigError(f"steps={steps}: a verification needs at least one step.")
    job = Job(
        module=path_of(module), data=path_of(data), config=dict(config or {}), world_size=size,
        steps=steps, seed=seed, double=double, accelerator=accelerator,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="smp_verify_") as name:
        folder = Path(name)
        job.write(folder)
        _run([sys.executable, "-m", _WORKER, name], "the run on one device", timeout)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                  "--nproc-per-node", str(size), "-m", _WORKER, name]  # fmt: skip
        _run(launch, f"the run on {size} ranks", timeout)
        reference = torch.load(folder / "reference.pt", weights_only=True)
        ranks = [torch.load(folder / f"rank_{r}.pt", weights_only=True) for r in range(size)]
    return compare(reference, ranks, tolerance)


def _run(command: list[str], what: str, timeout: float) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and paths made here
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise SMPError(
            f"{what} took more than timeout={timeout:g} seconds. Its last output:\n"
            f"{_tail(expired.stdout)}"
        ) from expired
    if done.returncode:
        output = _without_launcher(done.stdout)
        raise SMPError(f"{what} failed:\n{_tail(output)}\n{what} failed: {_reason(output)}")


def _tail(output: str | bytes | None) -> str:
    text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""
    return text[-_TAIL:]


def _without_launcher(output: str) -> str:
    """The output before torchrun's own account of a failure, which names no reason."""
    found = re.search(r"^[WE]\d{4} .*torch/distributed/elastic", output, re.MULTILINE)
    return output if found is None else output[: found.start()]


def _reason(output: str) -> str:
    """The failure that came first; of several errors others may follow from it."""
    for pattern in _REASONS:
        found = re.search(pattern, output, re.MULTILINE)
        if found is not None:
            return found.group(1)
    errors: list[str] = re.findall(
        r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", output, re.MULTILINE
    )
    return errors[-1] if errors else "see its output above."
