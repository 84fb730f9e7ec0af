"""One GPU: strategy "smp" against plain Lightning, and `plan` against what happens.

    python -m benchmarks.one_gpu

Prints two tables. Throughput: a GPT-2 of medium size in bf16-mixed with 1 and 4 microbatches, where
plain Lightning accumulates over as many batches; medians of rounds in turns. Ratios are the median
of the rounds' own, plain over smp, with random streams that do not depend on the layout, and
without. Plan: predicted and measured peak memory and step time of three models.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_smp import SMPStrategy
from lightning_smp.planning import DEVICES, Estimator, Setup, class_source
from lightning_smp.planning.estimate import Layout

__all__ = ["GPT", "Llama", "Tokens", "main"]

_WARM = 6


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(pl.LightningModule):
    """GPT-2 with a tied head; the default sizes are those of the medium one."""

    def __init__(
        self, width: int = 1024, depth: int = 24, heads: int = 16, vocabulary: int = 50257,
        length: int = 1024, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """The mean loss of the next token; [B, T] tokens."""
        x = self.tokens(batch) + self.positions.weight[: batch.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW, as one kernel."""
        fused = next(self.parameters()).is_cuda
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=fused)


class _Gated(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _Attention(width, heads)
        inner = 8 * width // 3 // 64 * 64
        self.up, self.gate = nn.Linear(width, inner, False), nn.Linear(width, inner, False)
        self.down = nn.Linear(inner, width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(GPT):
    """Gated blocks with root-mean-square norms, a head of its own, no dropout."""

    def __init__(
        self, width: int = 2048, depth: int = 16, heads: int = 16, vocabulary: int = 32000,
        length: int = 2048,
    ) -> None:  # fmt: skip
        super().__init__(width, 0, heads, vocabulary, length)
        self.blocks = nn.ModuleList(_Gated(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)


class Tokens(Dataset[Tensor]):
    """Random rows of ``length`` tokens, the same at each making."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class _Clock(pl.Callback):
    """Milliseconds of each optimizer step, the device awaited."""

    def __init__(self, batches: int) -> None:
        self.batches, self.taken, self.last = batches, [], 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Reads the clock after each optimizer step."""
        if (args[-1] + 1) % self.batches == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.taken.append((now - self.last) * 1e3)
            self.last = now


def _train(
    make: Callable[[], pl.LightningModule], strategy: Any, *, rows: int, length: int,
    vocabulary: int, accumulate: int, steps: int,
) -> tuple[list[float], float]:  # fmt: skip
    """Milliseconds of the steps after the first ones, and the peak of memory in bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    pl.seed_everything(0, verbose=False)
    clock = _Clock(accumulate)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=steps,
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    data = Tokens(rows * steps * accumulate, length, vocabulary)
    trainer.fit(make(), DataLoader(data, batch_size=rows))
    return clock.taken[_WARM:], float(torch.cuda.max_memory_allocated())


def _throughput(say: Callable[[str], None], rows: int, rounds: int, steps: int) -> None:
    say("| microbatches | plain ms | smp ms | plain / smp | plain / smp, reproducible=False |")
    say("|---|---|---|---|---|")
    sizes = {"length": 1024, "vocabulary": 50257, "steps": steps}

    def plain(count: int) -> float:
        return median(_train(GPT, "auto", rows=rows // count, accumulate=count, **sizes)[0])

    def smp(count: int, *, reproducible: bool) -> float:
        strategy = SMPStrategy(microbatches=count, reproducible=reproducible)
        return median(_train(GPT, strategy, rows=rows, accumulate=1, **sizes)[0])

    for count in (1, 4):
        contenders = [
            partial(plain, count), partial(smp, count, reproducible=True),
            partial(smp, count, reproducible=False),
        ]  # fmt: skip
        taken: list[list[float]] = [[] for _ in contenders]
        for index in range(rounds):
            order = range(len(contenders))
            for which in order if index % 2 == 0 else reversed(order):
                taken[which].append(contenders[which]())
        ratios = [median(map(truediv, taken[0], other)) for other in taken[1:]]
        say(
            f"| {count} | {median(taken[0]):.1f} | {median(taken[1]):.1f} "
            f"| {ratios[0]:.3f} | {ratios[1]:.3f} |"
        )


_MODELS: dict[str, tuple[str, dict[str, int], int, int, int]] = {
    # name: class, arguments, batch, microbatches, length
    "GPT-2 medium": ("GPT", {}, 8, 1, 1024),
    "GPT-2 large, 4 microbatches": ("GPT", {"width": 1280, "depth": 36, "heads": 20}, 16, 4, 1024),
    "Llama 1 B": ("Llama", {}, 4, 1, 2048),
}


def _plan(say: Callable[[str], None], steps: int) -> None:
    say("| model | memory, predicted | measured | ratio | step, predicted | measured | ratio |")
    say("|---|---|---|---|---|---|---|")
    device = DEVICES["h200"]
    for name, (kind, arguments, rows, count, length) in _MODELS.items():
        vocabulary = 50257 if kind == "GPT" else 32000
        source = class_source(
            f"benchmarks.one_gpu:{kind}", inputs=[f"int64:{length}"], precision="bf16-mixed",
            arguments=arguments,
        )  # fmt: skip
        atoms, profile = source.profile(device.model())
        setup = Setup(world_size=1, memory=device.memory, device=device, batch_size=rows)
        layout = Layout(1, 1, 1, 1, count, rows // count, False)
        estimate = Estimator(source.root, atoms, profile, setup).simulated(layout)
        taken, peak = _train(
            lambda kind=kind, arguments=arguments: globals()[kind](**arguments),
            SMPStrategy(microbatches=count), rows=rows, length=length, vocabulary=vocabulary,
            accumulate=1, steps=steps,
        )  # fmt: skip
        step = median(taken)
        say(
            f"| {name} | {estimate.peak / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB | "
            f"{estimate.peak / peak:.2f} | {estimate.step_s * 1e3:.1f} ms | {step:.1f} ms | "
            f"{estimate.step_s * 1e3 / step:.2f} |"
        )


def main(arguments: Sequence[str]) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="throughput,plan", help="by comma")
    parser.add_argument("--steps", type=int, default=26)
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    name = torch.cuda.get_device_name()
    say(f"{name}, torch {torch.__version__}, lightning {pl.__version__}\n")
    parts = options.parts.split(",")
    if "throughput" in parts:
        _throughput(say, options.rows, options.rounds, options.steps)
        say("")
    if "plan" in parts:
        _plan(say, options.steps)


if __name__ == "__main__":
    main(sys.argv[1:])
