"""Embeddings, heads and losses whose vocabulary is split give the numbers of whole ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_smp.errors import UnsupportedError
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.logits import SplitLogits, Vocabulary, split_logits
from lightning_smp.tensor_parallel.module import shardings_of
from lightning_smp.tensor_parallel.patterns import pattern_rule
from lightning_smp.tensor_parallel.replace import distribute
from tests.support.launch import gloo_group, run_ranks

V = 11
Step = Callable[[Any, Tensor], Tensor]


class _Twice(torch.autograd.Function):
    """A use of logits that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * x


def _smoothed(z: Any, y: Tensor) -> Tensor:
    shown = z[..., :-1, :].contiguous().view(-1, z.size(-1))
    return F.cross_entropy(shown, y[..., 1:].reshape(-1), label_smoothing=0.1)


def _weighted(z: Any, y: Tensor) -> Tensor:
    weight = torch.arange(1.0, V + 1, dtype=z.dtype)
    return nn.CrossEntropyLoss(weight=weight)(z.permute(0, 2, 1), y)


def _masked(z: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y != -100], y[y != -100], reduction="sum")


def _two_losses(z: Any, y: Tensor) -> Tensor:
    flat = z.flatten(0, 1)
    return F.cross_entropy(flat, y.flatten()) + F.cross_entropy(flat, y.flatten().clamp(0))


_PARALLEL: dict[str, Step] = {
    "plain": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "smoothed": _smoothed,
    "class_second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none").sum(),
    "weighted": _weighted,
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 3) * 3).flatten(0, 1), y.flatten()),
    "other_index": lambda z, y: F.cross_entropy(z.mT, y.clamp(0), ignore_index=4),
    "two_losses": _two_losses,
    "masked": _masked,
    "float32": lambda z, y: F.cross_entropy(z.float().view(-1, V), y.view(-1)),
}
_GATHERED: dict[str, Step] = {
    "log_softmax": lambda z, y: F.log_softmax(z, -1)[..., 2].sum(),
    "power_and_loss": lambda z, y: (z**2).sum() + F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "one_class": lambda z, y: z[:, :, 3].sum() + z[0].sum(),
    "function": lambda z, y: _Twice.apply(z),
    "shape_kept": lambda z, y: z[None, ..., 0:2, :].mean(),
}


def _targets(rank: int = 0) -> Tensor:
    targets = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(rank))
    targets[0, 1 + rank % 3] = -100
    return targets


def _gradients(step: Step, make: Callable[[Tensor], Any], y: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 5, V, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = step(make(x * 1.0), y)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("name", [*_PARALLEL, *_GATHERED])
def test_uses_of_logits_on_one_rank(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step = {**_PARALLEL, **_GATHERED}[name]
    vocabulary = Vocabulary(TensorParallel(), (V,))
    y = _targets()
    with caplog.at_level(logging.WARNING):
        found = _gradients(step, lambda x: split_logits(x[None], vocabulary), y)
        _gradients(step, lambda x: split_logits(x[None], vocabulary), y)
    wanted = _gradients(step, lambda x: x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-5 if name == "float32" else 1e-10, atol=1e-7)
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) == (name in _GATHERED)
    assert len(said) == len(set(said))  # each line once, though it ran twice
    assert all("test_vocabulary.py:" in line for line in said)


def test_logits_look_like_a_tensor_and_refuse_hooks() -> None:
    local = torch.randn(1, 2, 5, V, requires_grad=True)
    logits = split_logits(local, Vocabulary(TensorParallel(), (V,)))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (2, 5, V)
    assert logits.requires_grad
    assert "11 classes on rank 0 of 1" in repr(logits)
    with pytest.raises(UnsupportedError, match="register_hook"):
        logits.register_hook(print)


@pytest.mark.parametrize("is_read", [True, False])
def test_gradient_takes_the_memory_of_logits_that_nobody_can_read(is_read: bool) -> None:
    x = torch.randn(2, 5, V, requires_grad=True)
    local = (x * 1.0)[None]
    before, memory = local.detach().clone(), local.detach()
    logits: Any = split_logits(local, Vocabulary(TensorParallel(), (V,)))
    loss = F.cross_entropy(logits.flatten(0, 1), _targets().flatten())
    if not is_read:
        del logits
    loss.backward()
    assert torch.equal(memory, before) == is_read
    assert x.grad is not None
    assert torch.equal(memory[0], x.grad) != is_read


@pytest.mark.parametrize("reentrant", [True, False])
def test_logits_of_a_checkpointed_region(reentrant: bool) -> None:
    vocabulary = Vocabulary(TensorParallel(), (V,))

    def make(x: Tensor) -> Any:
        return checkpoint(
            lambda t: split_logits((t * 1.0)[None], vocabulary), x, use_reentrant=reentrant
        )

    step = _PARALLEL["plain"]
    found, wanted = _gradients(step, make, _targets()), _gradients(step, lambda x: x, _targets())
    torch.testing.assert_close(found, wanted)


def test_autocast_computes_the_loss_in_float32() -> None:
    vocabulary = Vocabulary(TensorParallel(), (V,))
    x = torch.randn(4, 8)
    weight = torch.randn(V, 8)
    with torch.autocast("cpu", torch.bfloat16):
        part = F.linear(x, weight)
        logits = split_logits(part[None], vocabulary)
        loss = F.cross_entropy(logits, torch.arange(4))
        wanted = F.cross_entropy(part, torch.arange(4))
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(loss, wanted)


class Tied(nn.Module):
    """An embedding and its head; 2 does not divide 11, nor do 4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(V, 6, padding_idx=8)
        self.head = nn.Linear(6, V)
        self.head.weight = self.emb.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.emb(ids)))


def _ids(rank: int) -> Tensor:
    return torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(50 + rank))


def _run(model: nn.Module, step: Step, ranks: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of losses over some ranks' samples, and its gradients."""
    model.zero_grad()
    loss = torch.stack([step(model(_ids(r)), _targets(r)) for r in ranks]).sum()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]


def _compare_on_ranks(rank: int, world_size: int) -> list[str]:
    problems: list[str] = []
    with gloo_group(60):
        for prescaled in (False, True):
            tp = TensorParallel.over(dist.group.WORLD, prescaled=prescaled)
            split: Any = Tied()
            rule = pattern_rule({"emb": "embedding", "head": "vocab"})
            split, report = distribute(split, tp, (rule,))
            assert len(report.distributed) == 2
            assert split.head.weight is split.emb.weight
            assert isinstance(split(_ids(rank)), SplitLogits)
            records = shardings_of(split)
            ranks = [0] if prescaled else list(range(world_size))
            for name, step in {**_PARALLEL, **_GATHERED}.items():
                loss, found = _run(split, step, [0 if prescaled else rank])
                if not prescaled:
                    dist.all_reduce(loss)
                wanted_loss, wanted = _run(Tied(), step, ranks)
                rtol = 1e-5 if name == "float32" else 1e-10
                where = f"{name} prescaled={prescaled}"
                if not torch.allclose(loss, wanted_loss, rtol=rtol, atol=rtol):
                    problems.append(f"{where}: loss {loss} instead of {wanted_loss}")
                for key, gradient in found.items():
                    part = records[key].shard(wanted[key], rank)
                    if not torch.allclose(gradient, part, rtol=rtol, atol=rtol):
                        problems.append(f"{where}: gradient of {key}")
    return problems


@pytest.mark.parametrize("world_size", [2, 4])
def test_vocabulary_on_ranks(world_size: int) -> None:
    assert run_ranks(_compare_on_ranks, world_size) == [[]] * world_size
