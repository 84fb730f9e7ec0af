"""Where the equality tests train: on CPU processes, or on GPUs over NCCL.

    LIGHTNING_SMP_TEST_ACCELERATOR=gpu python -m pytest tests/equality tests/tensor_parallel

Layouts of more ranks than there are GPUs are skipped then.
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["ACCELERATOR", "ONE_DEVICE", "needs_devices"]

ACCELERATOR = os.environ.get("LIGHTNING_SMP_TEST_ACCELERATOR", "cpu")
ONE_DEVICE = torch.device("cuda", 0) if ACCELERATOR == "gpu" else torch.device("cpu")


def needs_devices(world_size: int) -> None:
    """Skip the calling test where a layout has more ranks than there are GPUs."""
    if ACCELERATOR == "gpu" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
