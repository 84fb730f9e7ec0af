"""A node of GPUs: a Llama over tensor, pipeline and data parallelism, beside what torch offers.

    torchrun --nproc-per-node N -m benchmarks.multi_gpu [--parts large,replicas,bubble,bound,file]

Works for any even N. Every part trains in turn in the same processes; rank 0 prints a table per
part as it ends.

- large: `--size 8b`, random weights, bfloat16, every second layer recomputed in the backward:
  tp N; pp N with two numbers of microbatches; pp 2 x tp N/2; dp N.
- replicas: a model of 1 B parameters, dp N, against Lightning's DDP and FSDP.
- bubble: measured idle share of pp N against the formula, and step time against
  torch.distributed.pipelining with identical stages.
- bound: tp N with bounds on collectives in flight.
- file: seconds and memory of a checkpoint of the 1 B model, resumed in another layout.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_smp as smp
from benchmarks.gpu_stages import pipelining_step_s
from benchmarks.one_gpu import Tokens
from lightning_smp import SMPStrategy
from lightning_smp.deferred import default_dtype

__all__ = ["main"]

_SIZES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512},
}  # fmt: skip
_WARM = 2
"""Steps before the clock counts: the first records, the second follows for the first time."""


_CHECKED = 12
"""Steps after which ranks do not compare their batches at every step, which takes time."""


class LanguageModel(pl.LightningModule):
    """A Llama from its configuration, made on the device; every second layer recomputes."""

    def __init__(self, size: str, length: int, recompute: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**_SIZES[size], max_position_embeddings=length, use_cache=False)
        self.model = LlamaForCausalLM(config)
        if recompute:
            self.model.gradient_checkpointing_enable()
            for layer in self.model.model.layers[1::2]:
                layer.gradient_checkpointing = False

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """The mean loss of the next token; [B, T] tokens."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, as one kernel."""
        return torch.optim.AdamW(self.parameters(), 1e-5, fused=True)


class _Kept(Logger):
    """Keeps every number that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, list[float]] = {}

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keeps them."""
        for name, value in metrics.items():
            self.numbers.setdefault(name, []).append(float(value))


class _Clock(pl.Callback):
    """Seconds of each step, the device awaited; peak memory of the steps after the first ones."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.last = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """Reads the clock."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.taken.append(now - self.last)
        self.last = now
        if len(self.taken) == _WARM:
            torch.cuda.reset_peak_memory_stats()


class Bench:
    """What all parts need: the options, and how to train and to tell."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = int(os.environ["WORLD_SIZE"])
        self.is_first = os.environ["RANK"] == "0"

    def say(self, line: str) -> None:
        """Prints on rank 0, at once."""
        if self.is_first:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def train(
        self, strategy: Any, *, size: str, length: int, rows: int, recompute: bool = False,
        loggers: Any = False, ckpt_path: Path | None = None, steps: int | None = None,
        make: Callable[[], pl.LightningModule] | None = None,
    ) -> tuple[pl.Trainer, _Clock]:  # fmt: skip
        """Trains on this rank; ``rows`` sequences a step and replica. Collective."""
        steps = steps or self.options.steps
        pl.seed_everything(0, verbose=False)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        with device, default_dtype(torch.bfloat16):
            module = make() if make else LanguageModel(size, length, recompute)
        clock = _Clock()
        trainer = pl.Trainer(
            strategy=strategy, accelerator="gpu", devices=self.size, precision="bf16-true",
            max_steps=steps, logger=loggers, log_every_n_steps=1, callbacks=[clock],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = Tokens(rows * steps * self.size, length, _SIZES[size]["vocab_size"])
        trainer.fit(
            module, DataLoader(data, batch_size=rows), ckpt_path=ckpt_path, weights_only=False
        )
        return trainer, clock

    def row(
        self, what: str, strategy: Callable[[], Any], *, replicas: int, rows: int, **kw: Any
    ) -> None:
        """One line of a table of throughput. Collective."""
        _, clock = self.train(strategy(), rows=rows, **kw)
        step = median(clock.taken[_WARM:])
        tokens = replicas * rows * kw["length"] / step / self.size
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.say(f"| {what} | {step:.3f} | {tokens:.0f} | {float(peak):.1f} |")
        _forget()


def _large(bench: Bench) -> None:
    n, o = bench.size, bench.options
    bench.say(f"\nLlama of {o.size} parameters, {o.length} tokens a sequence, {n} GPUs")
    bench.say("| layout | s a step | tokens/s/GPU | peak GiB |\n|---|---|---|---|")
    common = {"size": o.size, "length": o.length, "recompute": True}
    few, many = o.microbatches, 2 * o.microbatches
    bench.row(f"tp {n}, {few} microbatches", lambda: _tp(n, few), replicas=1, rows=few, **common)
    for count in (few, many):
        bench.row(
            f"pp {n}, {count} microbatches",
            lambda count=count: SMPStrategy(pipeline_parallel_degree=n, microbatches=count),
            replicas=1, rows=count, **common,
        )  # fmt: skip
    if n >= 4:
        bench.row(
            f"pp 2 x tp {n // 2}, {few} microbatches",
            lambda: _tp(n // 2, few, pipeline_parallel_degree=2),
            replicas=1, rows=few, **common,
        )  # fmt: skip
    bench.row(
        f"dp {n}, 4 microbatches each", lambda: SMPStrategy(microbatches=4), replicas=n, rows=4,
        **common,
    )  # fmt: skip


def _tp(degree: int, microbatches: int, **more: Any) -> SMPStrategy:
    return SMPStrategy(
        tensor_parallel_degree=degree, tensor_parallel_modules="auto", prescaled_batch=True,
        microbatches=microbatches, **more,
    )  # fmt: skip


def _replicas(bench: Bench) -> None:
    n = bench.size
    bench.say(f"\n1 B parameters, 2048 tokens, 8 sequences a replica, {n} replicas")
    bench.say("| strategy | s a step | tokens/s/GPU | peak GiB |\n|---|---|---|---|")
    contenders: dict[str, Callable[[], Any]] = {
        "smp": lambda: SMPStrategy(microbatches=1),
        "DDP": lambda: DDPStrategy(gradient_as_bucket_view=True),
        "FSDP": lambda: FSDPStrategy(auto_wrap_policy={_llama_layer()}),
    }
    for turn in range(2):
        for name, strategy in contenders.items():
            bench.row(
                f"{name}, turn {turn + 1}", strategy, replicas=n, rows=8,
                size=bench.options.small, length=2048,
            )  # fmt: skip


def _llama_layer() -> type[nn.Module]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return LlamaDecoderLayer


def _bubble(bench: Bench) -> None:
    n, width, layers, length = bench.size, 2048, 16, 2048
    bench.say(f"\n{layers} layers of width {width}, {length} tokens, pp {n}: idle share, step time")
    bench.say("| order | m | idle, formula | idle, measured | ms | torch ms |\n" + "|---" * 6 + "|")
    for chunks in (1, 2):
        for m in (8, 32):
            kept = _Kept()
            clocks = []
            for every in (0, 2):  # a measured step costs the next one, too
                strategy = SMPStrategy(
                    pipeline_parallel_degree=n, microbatches=m, virtual_pipeline_degree=chunks,
                    timeline_every_n_steps=every, auto_partition=chunks > 1, default_partition=0,
                    memory_weight=0.0,
                )  # fmt: skip
                _, clock = bench.train(
                    strategy, size=bench.options.small, length=length, rows=m, loggers=kept,
                    make=lambda: Blocks(width, layers, n),
                )  # fmt: skip
                clocks.append(clock)
                _forget()
            plain = clocks[0].taken
            plain = plain[_CHECKED:] or plain[_WARM:]
            theirs = pipelining_step_s(
                Blocks(width, layers, n).blocks, n, chunks, m, length, bench.options.steps
            )
            _forget()
            formula = (n - 1) / (chunks * m + n - 1)
            measured = median(kept.numbers.get("smp/bubble", [float("nan")]))
            name = "interleaved" if chunks == 1 else f"{chunks} chunks"
            bench.say(
                f"| {name} | {m} | {formula:.3f} | {measured:.3f} | {median(plain) * 1e3:.1f} | "
                f"{theirs * 1e3:.1f} |"
            )


class Blocks(pl.LightningModule):
    """Equal blocks on [B, T] tokens' embeddings of fixed values: nothing but the pipeline."""

    def __init__(self, width: int, layers: int, stages: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        for index, block in enumerate(self.blocks):
            smp.set_partition(block, index * stages // layers)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """The mean square of the last block's output."""
        x = (batch[..., None] % 7 - 3).to(torch.bfloat16).expand(-1, -1, self.width)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, torch.zeros_like(x))

    def configure_optimizers(self) -> Any:
        """The cheapest."""
        return torch.optim.SGD(self.parameters(), 1e-6, fused=True)


def _bound(bench: Bench) -> None:
    n, o = bench.size, bench.options
    bench.say(f"\ntp {n}, bounds on the collectives in flight\n| limit | s | tokens/s/GPU | peak |")
    bench.say("|---|---|---|---|")
    for limit in ("1", "4", "8", "-1"):
        with mock.patch.dict(os.environ, {"SMP_NCCL_THROTTLE_LIMIT": limit}):
            bench.row(
                limit, lambda: _tp(n, 4), replicas=1, rows=4, size=o.size, length=o.length,
                recompute=True,
            )  # fmt: skip


def _file(bench: Bench) -> None:
    n, small = bench.size, bench.options.small
    common = {"size": small, "length": 2048, "rows": 4, "steps": 3}
    with tempfile.TemporaryDirectory(prefix="smp_benchmark_") as folder:
        path = Path(folder) / "model.ckpt"
        trainer, _ = bench.train(SMPStrategy(pipeline_parallel_degree=n, microbatches=4), **common)
        before = _host_gib()
        start = time.perf_counter()
        trainer.save_checkpoint(path)
        saved = time.perf_counter() - start
        peak, size = _host_gib() - before, path.stat().st_size / 2**30 if bench.is_first else 0.0
        del trainer
        _forget()
        start = time.perf_counter()
        trainer, clock = bench.train(_tp(n, 4), ckpt_path=path, **{**common, "steps": 5})
        resumed = time.perf_counter() - start - sum(clock.taken[1:])
        bench.say(
            f"\ncheckpoint of {size:.1f} GiB at pp {n}: saved in {saved:.1f} s, rank 0 took "
            f"{peak:.1f} GiB of host memory; at tp {n} again at step {trainer.global_step} "
            f"(set-up, loading and first step {resumed:.1f} s)"
        )


def _host_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


_PARTS: dict[str, Callable[[Bench], None]] = {
    "large": _large, "replicas": _replicas, "bubble": _bubble, "bound": _bound, "file": _file,
}  # fmt: skip


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(_PARTS))
    parser.add_argument("--size", default="8b", choices=_SIZES)
    parser.add_argument("--small", default="1b", choices=_SIZES)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    bench = Bench(parser.parse_args())
    bench.say(
        f"{bench.size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"lightning {pl.__version__}"
    )
    for name in bench.options.parts.split(","):
        start = time.perf_counter()
        _PARTS[name](bench)
        bench.say(f"({name}: {time.perf_counter() - start:.0f} s)")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
