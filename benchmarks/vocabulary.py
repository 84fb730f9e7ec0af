"""Memory and time of a head and its loss over two processes: in parallel, and on gathered logits.

Both ranks hold one batch of hidden states and half of the head's weight. Losses and gradients of
the two ways are compared before anything is reported.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import run_two_ranks
from lightning_smp.tensor_parallel.collectives import copy_in, gather
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.logits import Vocabulary, split_logits
from lightning_smp.tensor_parallel.record import split_sizes

__all__ = ["main"]

_MIB = 2**20


def _parallel(hidden: Tensor, weight: Tensor, targets: Tensor, tp: TensorParallel) -> Tensor:
    vocabulary = Vocabulary(tp, _sizes(tp))
    logits = split_logits(F.linear(copy_in(hidden, tp), weight)[None], vocabulary)
    return F.cross_entropy(logits.float(), targets)


def _gathered(hidden: Tensor, weight: Tensor, targets: Tensor, tp: TensorParallel) -> Tensor:
    part = F.linear(copy_in(hidden, tp), weight)
    logits = gather(part, tp, -1, _sizes(tp), sum_gradient=False)
    return F.cross_entropy(logits.float(), targets)


_WAYS: dict[str, Callable[..., Tensor]] = {"parallel": _parallel, "gathered": _gathered}
_VOCABULARY = [0]


def _sizes(tp: TensorParallel) -> tuple[int, ...]:
    return split_sizes(_VOCABULARY[0], tp.size)


def _resident_mib(what: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def _rank(rank: int, way: str, rows: int, width: int, vocabulary: int, repeats: int) -> Tensor:
    """Seconds (median), MiB above the inputs, loss, and norms of both gradients."""
    _VOCABULARY[0] = vocabulary
    assert dist.group.WORLD is not None
    tp = TensorParallel.over(dist.group.WORLD, prescaled=True)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    generator.manual_seed(1 + rank)
    weight = (
        torch.randn(_sizes(tp)[rank], width, generator=generator) / width**0.5
    ).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    times = []
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
    before = _resident_mib("VmRSS")
    for _ in range(repeats):
        hidden.grad.zero_(), weight.grad.zero_()
        dist.barrier()
        start = time.perf_counter()
        loss = _WAYS[way](hidden, weight, targets, tp)
        loss.backward()
        times.append(time.perf_counter() - start)
    peak = _resident_mib("VmHWM") - before
    return torch.tensor(
        [median(times), peak, loss.item(), hidden.grad.norm().item(), weight.grad.norm().item()]
    )


def main() -> None:
    """Runs both ways in turns and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, list[Tensor]] = {way: [] for way in _WAYS}
    for turn in range(args.rounds):
        for way in list(_WAYS)[:: 1 if turn % 2 == 0 else -1]:
            ranks = run_two_ranks(_rank, way, args.rows, args.width, args.vocabulary, args.repeats)
            found[way].append(torch.stack(ranks))
    both = [torch.stack(found[way]) for way in _WAYS]
    torch.testing.assert_close(both[0][..., 2:], both[1][..., 2:], rtol=1e-4, atol=1e-6)
    write = sys.stdout.write
    write("| way | seconds | peak, MiB | logits of a rank, MiB |\n|---|---|---|---|\n")
    for way, result in zip(_WAYS, both, strict=True):
        seconds, peak = result[..., 0].max(1).values.median(), result[..., 1].max()
        columns = args.vocabulary if way == "gathered" else -(-args.vocabulary // 2)
        logits = args.rows * columns * 4 / _MIB
        write(f"| {way} | {seconds:.2f} | {peak:.0f} | {logits:.0f} |\n")
    ratio = (both[0][..., 0].max(1).values / both[1][..., 0].max(1).values).median()
    write(f"\nseconds, parallel over gathered: {ratio:.2f}\n")


if __name__ == "__main__":
    main()
