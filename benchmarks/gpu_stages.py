"""A step of torch.distributed.pipelining over blocks on GPUs, for comparison."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

__all__ = ["pipelining_step_s"]


class _Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def pipelining_step_s(
    blocks: nn.ModuleList, ranks: int, chunks: int, microbatches: int, length: int, steps: int
) -> float:
    """Median seconds of a step with SGD, the first two left out. Collective over the world.

    Args:
        blocks: equal on all ranks; each maps [B, T, W] to [B, T, W].
        ranks: of the pipeline, which is the world.
        chunks: stages of a rank.
        microbatches: of one sequence.
        length: tokens of a sequence.
        steps: to run.
    """
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    width = next(blocks.parameters()).shape[1]
    size = len(blocks) // (ranks * chunks)
    stages = []
    for chunk in range(chunks):
        first = (rank + chunk * ranks) * size
        part = _Stage(list(blocks[first : first + size])).to(device, torch.bfloat16)
        stages.append(PipelineStage(part, rank + chunk * ranks, ranks * chunks, device))
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, 1e-6, fused=True)
    loss = nn.functional.mse_loss
    schedule = (
        Schedule1F1B(stages[0], microbatches, loss_fn=loss)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss)
    )
    x = torch.randn(microbatches, length, width, device=device, dtype=torch.bfloat16)
    target = torch.zeros_like(x)
    taken = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        inputs = (x,) if rank == 0 else ()
        keywords = {"target": target, "losses": []} if rank == ranks - 1 else {}
        schedule.step(*inputs, return_outputs=False, **keywords)
        optimizer.step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[2:])
