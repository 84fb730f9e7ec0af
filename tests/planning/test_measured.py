"""Predictions against what one NVIDIA H200 did (torch 2.11.0, CUDA 13.0), within the tolerances.

The constants come from measurements of single kernels, so that none of these models is fitted. The
first three are those of `benchmarks.one_gpu`; the others were held back. Times are those of a plain
loop, peaks those of the strategy, which has one set of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_smp.planning import (
    DEVICES,
    Estimate,
    Estimator,
    Layout,
    Setup,
    class_source,
    hugging_face_source,
)
from lightning_smp.planning.sources import Source

_GIB = 2**30
_MEMORY_TOLERANCE = 0.10
_TIME_TOLERANCE = 0.15


@dataclass(frozen=True)
class Measured:
    """One training run: AdamW (fused), bf16-mixed; medians of 8 steps, awaited each."""

    name: str
    kind: str
    arguments: dict[str, Any]
    length: int
    microbatch_size: int
    microbatches: int
    step_ms: float
    peak_gib: float

    def source(self) -> Source:
        """The model."""
        if self.kind in ("gpt2", "llama"):
            return hugging_face_source(
                self.kind, sequence_length=self.length, precision="bf16-mixed",
                overrides=self.arguments,
            )  # fmt: skip
        return class_source(
            f"benchmarks.one_gpu:{self.kind}", inputs=[f"int64:{self.length}"],
            precision="bf16-mixed", arguments=self.arguments,
        )  # fmt: skip

    def predicted(self) -> Estimate:
        """What the planner says of it."""
        device = DEVICES["h200"]
        source = self.source()
        atoms, profile = source.profile(device.model())
        assert profile.analysis.reason is None
        setup = Setup(
            world_size=1, memory=device.memory, device=device,
            batch_size=self.microbatch_size * self.microbatches,
        )  # fmt: skip
        layout = Layout(1, 1, 1, 1, self.microbatches, self.microbatch_size, recompute=False)
        return Estimator(source.root, atoms, profile, setup).simulated(layout)


def _gpt(name: str, width: int, depth: int, heads: int, *numbers: Any) -> Measured:
    arguments = {"width": width, "depth": depth, "heads": heads, "length": numbers[0]}
    return Measured(name, "GPT", arguments, *numbers)


def _llama(name: str, width: int, depth: int, heads: int, *numbers: Any) -> Measured:
    arguments = {"width": width, "depth": depth, "heads": heads, "length": numbers[0]}
    return Measured(name, "Llama", arguments, *numbers)


# name, width, depth, heads; length, microbatch, microbatches, ms a step, GiB
MEASURED = [
    _gpt("gpt2-medium", 1024, 24, 16, 1024, 8, 1, 80.0, 15.71),
    _gpt("gpt2-large", 1280, 36, 20, 1024, 4, 4, 338.7, 21.78),
    _llama("llama-0.9b", 2048, 16, 16, 2048, 4, 1, 112.9, 25.62),
    _gpt("gpt2-small", 768, 12, 12, 1024, 16, 2, 154.2, 15.25),
    _gpt("gpt2-small, bound by the host", 768, 12, 12, 512, 1, 1, 18.2, 2.11),
    _llama("llama, wide", 4096, 4, 32, 4096, 1, 1, 57.4, 17.94),
]
HUGGING_FACE = [
    Measured(
        "Hugging Face gpt2-medium", "gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16},
        1024, 8, 1, 120.5, 26.23,
    ),
    Measured(
        "Hugging Face llama-0.9b", "llama",
        {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
         "max_position_embeddings": 2048},
        2048, 4, 1, 148.9, 30.81,
    ),
]  # fmt: skip


def _name(one: Measured) -> str:
    return one.name


@pytest.mark.parametrize("one", MEASURED, ids=_name)
def test_prediction_meets_measurement(one: Measured) -> None:
    """Whole models, seconds each: sums over many kernels are what is promised."""
    predicted = one.predicted()
    assert predicted.peak / _GIB == pytest.approx(one.peak_gib, rel=_MEMORY_TOLERANCE)
    assert predicted.step_s * 1e3 == pytest.approx(one.step_ms, rel=_TIME_TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("one", HUGGING_FACE, ids=_name)
def test_prediction_of_hugging_face_models(one: Measured) -> None:
    """Their activations are chains of small operations, under other autocast rules than a CPU's."""
    test_prediction_meets_measurement(one)
