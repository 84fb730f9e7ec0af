"""`python -m lightning_smp info`: the versions met, and which native parts are used."""

from __future__ import annotations

import argparse
import platform

import torch

import lightning_smp
from lightning_smp.errors import ConfigError
from lightning_smp.native import Loaded, load_backend, load_kernels
from lightning_smp.native.switches import throttle_limit

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Print the report; the exit status is 0 also where nothing is built, 2 for bad settings."""
    parser = argparse.ArgumentParser("python -m lightning_smp info", description=__doc__)
    parser.parse_args(arguments)
    try:
        lines = _lines()
    except ConfigError as error:
        print(error)
        return 2
    for name, value in lines:
        print(f"{name + ':':22}{value}")
    return 0


def _lines() -> list[tuple[str, str]]:
    cuda = torch.version.cuda or "none"
    return [
        ("lightning_smp", lightning_smp.__version__),
        ("Python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {cuda}, devices: {torch.cuda.device_count()})"),
        ("throttled backend", _state(load_backend(), "collectives are bounded in Python")),
        ("CUDA kernels", _state(load_kernels(), "plain torch operations are used")),
        ("throttle limit", str(throttle_limit())),
    ]


def _state(loaded: Loaded, instead: str) -> str:
    if loaded.path is not None:
        return f"used, from {loaded.path}"
    return f"not used ({instead}): {loaded.reason}"
