"""Reduces gradients as the library does, and joins them, for tests without a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import parameter_kinds, shardings_of


def joined(model: nn.Module, tp: TensorParallel, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors, on every rank, of values by parameter name."""
    shardings = shardings_of(model)
    full = {}
    for name, value in values.items():
        if name not in shardings:
            full[name] = value
            continue
        padded = torch.zeros(max(shardings[name].local_numel(r) for r in range(tp.size))).to(value)
        padded[: value.numel()] = value.reshape(-1)
        parts = [torch.empty_like(padded) for _ in range(tp.size)]
        dist.all_gather(parts, padded, group=tp.group)
        shapes = [shardings[name].local_shape(r) for r in range(tp.size)]
        full[name] = shardings[name].unshard(
            [part[: torch.Size(s).numel()].view(s) for part, s in zip(parts, shapes, strict=True)]
        )
    return full


def mean_gradients(model: nn.Module, tp: TensorParallel) -> dict[str, Tensor]:
    """Gradients of the mean over the group's samples; each rank had the mean of its own."""
    gradients = {}
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if tp.prescaled:
            gradients[name] = gradient
        elif kinds[parameter] == "plain":
            dist.all_reduce(gradient, group=tp.group)
            gradients[name] = gradient / tp.size
        else:
            gradients[name] = gradient / tp.size
    return joined(model, tp, gradients)


def own(x: Any, tp: TensorParallel) -> Any:
    """This rank's samples of a whole batch."""
    if tp.prescaled or not isinstance(x, Tensor):
        return x
    return x.chunk(tp.size)[tp.rank]


def compare(
    plain: nn.Module, split: nn.Module, tp: TensorParallel, call: Callable[[nn.Module, Any], Tensor]
) -> None:
    """Checks loss and every gradient of a split module against the whole one.

    `call(module, cut)` returns a loss that is a mean over samples, where `cut` takes a rank's part
    of a batch.
    """
    plain.zero_grad()
    loss = call(plain, lambda x: x)
    loss.backward()
    split.zero_grad()
    part = call(split, lambda x: own(x, tp))
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total, group=tp.group)
    torch.testing.assert_close(total / tp.size, loss.detach(), rtol=1e-11, atol=1e-12)
    found = mean_gradients(split, tp)
    for name, parameter in plain.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            found[name], wanted, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )
