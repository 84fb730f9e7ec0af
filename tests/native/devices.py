"""The devices that tests of native kernels run on: the reference on the CPU, kernels on CUDA."""

from __future__ import annotations

import pytest
import torch

from lightning_smp.native.kernels.library import has_cuda_kernel
from lightning_smp.native.loading import load_kernels

_NEEDS_KERNEL = "needs a CUDA device and the built extension"


def devices(operator: str) -> list[object]:
    """Parameters for a test of `operator`: "cpu", and "cuda" under the mark `gpu`."""
    if torch.cuda.is_available():
        load_kernels()
    is_ready = torch.cuda.is_available() and has_cuda_kernel(operator)
    marks = [pytest.mark.gpu, pytest.mark.skipif(not is_ready, reason=_NEEDS_KERNEL)]
    return ["cpu", pytest.param("cuda", marks=marks)]
