"""`python -m lightning_smp verify`: proves that a layout trains as one device does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_smp.errors import ConfigError, SMPError
from lightning_smp.verifying import verify

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Verify; the exit status is 0 if all is equal, 1 if something differs, 2 if a run failed."""
    options = _parser().parse_args(list(arguments))
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's modules are found from the folder of the command
    try:
        report = verify(
            options.module, options.data, config=_config(options), world_size=options.world_size,
            steps=options.steps, seed=options.seed, double=options.double,
            accelerator=options.accelerator, tolerance=options.tolerance, timeout=options.timeout,
        )  # fmt: skip
    except SMPError as error:
        sys.stderr.write(f"python -m lightning_smp verify: {error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return 0 if report.equal else 1


def _config(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "pipeline_parallel_degree": options.pp,
        "tensor_parallel_degree": options.tp,
        "microbatches": options.microbatches,
    }
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r}: write it as KEY=VALUE.")
        config[key] = _value(value)
    return config


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_smp verify", description=__doc__)
    add = parser.add_argument
    add("module", help="package.module:name of what makes the LightningModule")
    add("--data", help="the same for a loader or LightningDataModule; default: the module's own")
    add("--pp", type=int, default=2, help="pipeline_parallel_degree (default 2)")
    add("--tp", type=int, default=1, help="tensor_parallel_degree (default 1)")
    add("--microbatches", type=int, default=2, help="parts of a batch (default 2)")
    add("--world-size", type=int, help="processes (default pp x tp)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other SMP key")
    add("--steps", type=int, default=3, help="optimizer steps (default 3)")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="compute in float64")
    add("--accelerator", default="cpu", choices=["cpu", "gpu"])
    add("--tolerance", type=float, help="relative; by default by dtype")
    add("--timeout", type=float, default=600.0, help="seconds for each run")
    return parser
