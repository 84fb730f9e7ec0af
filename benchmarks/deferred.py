"""Peak host memory of one rank that builds a large model under deferred construction.

The process builds a GPT-like model, plans its partition over the stages, keeps one stage and gives
up the rest, as a rank of a pipeline does at its first step. The peak is that of the whole process
(`ru_maxrss`), so it is measured once a process.

    OMP_NUM_THREADS=1 python -m benchmarks.deferred --stage 3
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_smp as smp
from lightning_smp.deferred import is_deferred
from lightning_smp.partitioning import (
    Partition,
    analyze,
    fake_batch,
    find_atoms,
    new_fake_mode,
    plan_partition,
)
from lightning_smp.weights.ownership import Ownership, materialize, release

__all__ = ["GPT", "build_stage", "main"]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).view(split).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """GPT with its own initialisation on top of that of the layers, as scripts write it."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of token numbers [batch, length]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _step(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def build_stage(
    stages: int, stage: int, *, layers: int, width: int, vocabulary: int
) -> dict[str, float]:
    """Builds the model and keeps one stage.

    Returns:
        Sizes in bytes and times in seconds: `whole`, `stage` (what it holds), `before` (the
        process with everything imported, after a tiny model), `peak`, `build_s`, `place_s`;
        `parameters` as a number.
    """
    with smp.delay_param_initialization():
        tiny = GPT(1, 64, 10)
    _plan(tiny, 1)  # imports what an analysis needs
    before = _peak_bytes()
    torch.manual_seed(1)
    start = time.perf_counter()
    with smp.delay_param_initialization():
        model = GPT(layers, width, vocabulary)
    build_s = time.perf_counter() - start
    assert all(is_deferred(p) for p in model.parameters())
    partition = _plan(model, stages)
    start = time.perf_counter()
    held: dict[str, set[int]] = {}
    for name, home in partition.stage_of.items():
        for path, _ in model.get_submodule(name).named_parameters():
            held.setdefault(f"{name}.{path}", set()).add(home)
    ownership = Ownership(model, held, pp_rank=stage, pp_size=stages)
    release(model, ownership)
    materialize(model, ownership, torch.device("cpu"))
    place_s = time.perf_counter() - start
    local = [p for p in ownership.parameters() if ownership.is_local(p)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "whole": sum(p.numel() * p.element_size() for p in model.parameters()),
        "stage": sum(p.numel() * p.element_size() for p in local),
        "before": before,
        "peak": _peak_bytes(),
        "build_s": build_s,
        "place_s": place_s,
    }


def _plan(model: GPT, stages: int) -> Partition:
    atoms = find_atoms(model)
    mode = new_fake_mode()
    ids = fake_batch(torch.zeros(1, 64, dtype=torch.long), mode)
    analysis = analyze(model, lambda copy: _step(copy, ids), atoms, mode=mode)
    return plan_partition(model, analysis, atoms, stages, memory_weight=0.8)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--vocabulary", type=int, default=50257)
    options = vars(parser.parse_args())
    result = build_stage(options.pop("stages"), options.pop("stage"), **options)
    result["peak / stage"] = round(result["peak"] / result["stage"], 3)
    result["(peak - before) / stage"] = round(
        (result["peak"] - result["before"]) / result["stage"], 3
    )
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
