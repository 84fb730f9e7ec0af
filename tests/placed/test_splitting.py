"""A backward in two parts gives what a whole one gives, and its first part leaves work undone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_smp.placed.splitting import backward_of_inputs


class Shared(nn.Module):
    """One layer called twice: its weight's gradient comes from two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(self.first(x).relu()))
        return out


class Penalty(nn.Module):
    """A weight that is also used off the way to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + self.first.weight.square().mean()


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))
        return out


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.net(x)
        return out.float()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6, bias=False)), 2),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)), 1),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0), 3),
    "convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(-1, (2, 3)), nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose1d(4, 2, 3, padding=1, groups=2), nn.Flatten(-2),
        ),
        2,
    ),
    "frozen": (lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)), 1),
    "shared": (Shared, 1),
    "penalty": (Penalty, 1),
    "recomputed": (lambda: Recomputed(use_reentrant=False), 1),
    "recomputed reentrant": (lambda: Recomputed(use_reentrant=True), 0),
    "autocast": (Halves, 2),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))), 1,
    ),
}  # fmt: skip


def _anchored(x: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf, and a value that hangs on it."""
    anchor = x.clone().requires_grad_()
    return anchor, anchor * 1


@pytest.mark.parametrize("name", MODELS)
def test_two_parts_equal_one(name: str) -> None:
    torch.manual_seed(1)
    make, num_products = MODELS[name]
    whole = make()
    split = copy.deepcopy(whole)
    x = torch.randn(5, 6)
    entered = x.clone().requires_grad_()
    whole(entered).square().sum().backward()

    anchor, value = _anchored(x)
    finished: list[str] = []
    for path, parameter in split.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, path=path: finished.append(path))
    loss = split(value).square().sum()
    later = backward_of_inputs([loss], [torch.ones(())], [anchor])
    assert len(later.products) == num_products
    torch.testing.assert_close(anchor.grad, entered.grad)
    undone = [p for p in split.parameters() if p.requires_grad and p.grad is None]
    assert len(undone) >= num_products
    later.run()
    for (path, mine), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=lambda m, path=path: f"{path}: {m}")
        if mine.grad is not None and other.grad is not None:
            assert mine.grad.stride() == other.grad.stride()
    trained = [path for path, p in split.named_parameters() if p.requires_grad]
    if "reentrant" not in name:  # its inner backward accumulates by itself
        assert sorted(finished) == sorted(trained), "every hook once"


def test_gradients_add_up_over_microbatches() -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    split = copy.deepcopy(whole)
    parts = []
    for _ in range(3):
        x = torch.randn(5, 6)
        whole(x).square().sum().backward()
        anchor, value = _anchored(x)
        loss = split(value).square().sum()
        parts.append(backward_of_inputs([loss], [torch.ones(())], [anchor]))
    for part in parts:
        part.run()
    for mine, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_without_anything_to_send_all_is_put_off() -> None:
    net = nn.Linear(6, 6)
    anchor = torch.empty((), requires_grad=True)
    later = backward_of_inputs([net(torch.ones(2, 6)).sum()], [torch.ones(())], [anchor])
    assert net.weight.grad is None
    later.run()
    assert net.weight.grad is not None


def test_first_part_computes_no_products() -> None:
    """Counted in operations: one product a layer is left to the second part."""
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    anchor, value = _anchored(torch.randn(16, 32))
    loss = net(value).sum()
    first, second = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with first:
        later = backward_of_inputs([loss], [torch.ones(())], [anchor])
    with second:
        later.run()
    assert first.get_total_flops() == second.get_total_flops() == 4 * 2 * 16 * 32 * 32
