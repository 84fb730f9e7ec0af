"""Host time that distributed modules add to plain ones: a world of one, groups of degree 1.

With one rank nothing is sent and the maths is the same, so what is left of the difference is the
modules' own Python and their autograd functions. (`SMPStrategy` distributes nothing in a world of
one; here it is made to.) A long kernel is queued before each turn, so that the host never waits for
the device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tensor_parallel import Layer
from lightning_smp.nn import DistributedTransformer
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.patterns import pattern_rule

__all__ = ["main"]

_HIDDEN, _HEADS, _ROWS, _TOKENS, _VOCABULARY = 64, 4, 2, 16, 256
_HEAD_START_S = 0.05


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, 4 * _HIDDEN), nn.Linear(4 * _HIDDEN, _HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_HIDDEN, _VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.zeros(_ROWS * _TOKENS, dtype=torch.long, device=x.device)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets)


def _whole_layer(tp: TensorParallel | None) -> nn.Module:
    if tp is None:
        return Layer(_HIDDEN, _HEADS)
    return DistributedTransformer(
        1, _HEADS, _HIDDEN // _HEADS, _HIDDEN, 4 * _HIDDEN, 0.0, 0.0, causal_mask_size=_TOKENS,
        pre_layernorm=True, post_layernorm=False, tp=tp,
    )  # fmt: skip


def _by(make: Callable[[], nn.Module], rules: Mapping[str, str]) -> Callable[..., nn.Module]:
    def build(tp: TensorParallel | None) -> nn.Module:
        if tp is None:
            return make()
        module = make()
        pattern_rule(dict(rules))("", module, tp)  # `distribute` leaves a world of one as it is
        return module

    return build


_CASES: dict[str, Callable[[TensorParallel | None], nn.Module]] = {
    "Linear, Linear (column, row)": _by(_MLP, {"up": "column", "down": "row"}),
    "head and cross entropy (vocab)": _by(_Head, {"head": "vocab"}),
    "GPT layer (column, row)": _by(
        lambda: Layer(_HIDDEN, _HEADS),
        {**dict.fromkeys(("query", "key", "value", "up"), "column"), "dense": "row", "down": "row"},
    ),
    "GPT layer (smp.nn)": _whole_layer,
}


def _step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    is_tuple = isinstance(module, DistributedTransformer)

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        y = module((x, None))[0] if is_tuple else module(x)
        y.sum().backward()

    return step


def _cost_us(step: Callable[[], None], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_HEAD_START_S * 1.7e9))  # cycles
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e6 / repeats


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="smp_benchmark_") as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store",
            rank=0, world_size=1, timeout=timedelta(seconds=60),
        )  # fmt: skip
        group = dist.group.WORLD
        assert group is not None
        tp = TensorParallel.over(group, prescaled=True)
        sys.stdout.write(f"{device.type}, torch {torch.__version__}; forward and backward\n")
        sys.stdout.write(f"{'module':32s} {'plain us':>9s} {'smp us':>9s} {'added us':>9s}\n")
        for name, build in _CASES.items():
            x = torch.randn(_ROWS, _TOKENS, _HIDDEN, device=device, requires_grad=True)
            steps = [_step(build(which).to(device), x) for which in (None, tp)]
            for step in steps * 3:
                step()
            pairs = [
                [_cost_us(step, options.repeats, device) for step in steps]
                for _ in range(options.rounds)
            ]
            plain, ours = (median(side) for side in zip(*pairs, strict=True))
            added = median(one - other for other, one in pairs)
            sys.stdout.write(f"{name:32s} {plain:9.1f} {ours:9.1f} {added:9.1f}\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
