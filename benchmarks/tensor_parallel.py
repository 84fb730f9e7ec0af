"""Step time of a small GPT split over two processes: smp.nn, and DTensor's parallelize_module.

Both run the same layers with the same weights on one batch that both ranks hold; results are
compared before anything is measured. Lightning's ModelParallelStrategy trains what DTensor's
function returns; both strategies are also run inside a Trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_smp as smp
from benchmarks.measure import alternate, run_two_ranks
from lightning_smp.nn import DistributedTransformer
from lightning_smp.tensor_parallel.context import TensorParallel

__all__ = ["main"]


class Layer(nn.Module):
    """A GPT layer; `num_heads` are this rank's, which DTensor users patch by hand."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.dense = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] in and out."""
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dense(context.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


_PLAN: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel),
    **dict.fromkeys(("dense", "down"), RowwiseParallel),
}
_NAMES = {
    "norm1": "attention.pre_layernorm",
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "dense": "attention.dense",
    "norm2": "output.pre_layernorm",
    "up": "output.dense1",
    "down": "output.dense2",
}


def _plain(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(args.hidden, args.heads) for _ in range(args.layers)))


def _with_dtensor(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in model:
        plan = {name: style() for name, style in _PLAN.items()}
        parallelize_module(layer, mesh, plan)
        layer.num_heads //= mesh.size()
    return model


def _with_smp(args: argparse.Namespace, tp: TensorParallel) -> DistributedTransformer:
    model = DistributedTransformer(
        args.layers, args.heads, args.hidden // args.heads, args.hidden, 4 * args.hidden, 0.0, 0.0,
        causal_mask_size=args.tokens, pre_layernorm=True, post_layernorm=False, tp=tp,
    )  # fmt: skip
    for ours, theirs in zip(model.seq_layers, _plain(args), strict=True):
        for name, full in theirs.named_parameters():
            path, _, kind = name.rpartition(".")
            module = ours.get_submodule(_NAMES[path])
            module.fill(kind, lambda whole, full=full: whole.copy_(full))
    return model


def _step(model: nn.Module, x: Tensor, is_tuple: bool) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        y = model((x, None))[0] if is_tuple else model(x)
        y.square().mean().backward()

    return step


class _Trained(pl.LightningModule):
    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        super().__init__()
        self.args, self.kind = args, kind
        self.net: nn.Module | None = None
        self.times: list[float] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.kind == "smp":
            self.net = _with_smp(self.args, smp.state.tensor_parallel)
        else:
            self.net = _with_dtensor(_plain(self.args), self.device_mesh["tensor_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        y = self.net((batch[0], None))[0] if self.kind == "smp" else self.net(batch[0])
        return y.square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=False)


def _in_trainer(args: argparse.Namespace, kind: str, x: Tensor) -> float:
    """Median seconds from one batch's end to the next."""
    strategy: Any
    if kind == "smp":
        strategy = smp.SMPStrategy(
            tensor_parallel_degree=2, prescaled_batch=True, optimize="speed", reproducible=False
        )
    else:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    model = _Trained(args, kind)
    loader = DataLoader(TensorDataset(x.repeat(args.steps, 1, 1)), batch_size=x.shape[0])
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return median(b - a for a, b in zip(model.times[2:], model.times[3:], strict=False))


def _rank(rank: int, args: argparse.Namespace) -> None:
    group = dist.group.WORLD
    assert group is not None
    x = torch.randn(
        args.batch, args.tokens, args.hidden, generator=torch.Generator().manual_seed(1)
    )
    mesh = init_device_mesh("cpu", (2,))
    dtensor = _with_dtensor(_plain(args), mesh)
    contenders: dict[str, Callable[[], None]] = {"DTensor": _step(dtensor, x, False)}
    for optimize in ("speed", "memory"):
        tp = TensorParallel.over(group, prescaled=True, optimize=optimize)  # type: ignore[arg-type]
        model = _with_smp(args, tp)
        torch.testing.assert_close(model((x, None))[0], dtensor(x), rtol=1e-3, atol=1e-3)
        contenders[f"smp {optimize}"] = _step(model, x, True)
    for step in contenders.values():
        step()
    runs = alternate(contenders, microbatches=1, rounds=args.rounds, repeats=1)
    if rank == 0:
        for name, costs in runs.items():
            ratios = [a.wall_us / b.wall_us for a, b in zip(costs, runs["DTensor"], strict=True)]
            wall, cpu = median(c.wall_us for c in costs), median(c.cpu_us for c in costs)
            sys.stdout.write(
                f"{name:12} {wall / 1e3:8.1f} ms wall {cpu / 1e3:8.1f} ms cpu  "
                f"ratio {median(ratios):.2f}\n"
            )
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # Lightning starts no processes then
    pairs = [
        (_in_trainer(args, "smp", x), _in_trainer(args, "dtensor", x)) for _ in range(args.pairs)
    ]
    if rank == 0 and pairs:
        ours, theirs = (median(side) for side in zip(*pairs, strict=True))
        ratio = median(one / other for one, other in pairs)
        sys.stdout.write(
            f"in a Trainer: SMPStrategy {ours * 1e3:.1f} ms, ModelParallelStrategy "
            f"{theirs * 1e3:.1f} ms, ratio {ratio:.2f}\n"
        )


def main() -> None:
    """Parse the options and run two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        *(("layers", 4), ("hidden", 512), ("heads", 8), ("tokens", 256), ("batch", 2)),
        *(("rounds", 15), ("steps", 8), ("pairs", 3)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    warnings.filterwarnings("ignore")
    run_two_ranks(_rank, parser.parse_args())


if __name__ == "__main__":
    main()
