"""Models and steps shared by the tests of placed execution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "ALTERNATING", "EACH", "HALVES", "U_SHAPE", "Chain", "Tied", "chain_loss", "ping_pong",
    "tied_head", "u_shape",
]  # fmt: skip

HALVES = {"a": 0, "b": 0, "c": 1, "d": 1}
ALTERNATING = {"a": 0, "b": 1, "c": 0, "d": 1}
U_SHAPE = {"a": 0, "b": 1, "c": 1, "d": 0}
EACH = {"a": 0, "b": 1, "c": 2, "d": 3}


class Chain(nn.Module):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Tied(nn.Module):
    """An embedding whose weight is the head's, used outside of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


def chain_loss(model: nn.Module, x: Tensor, number: int) -> Tensor:
    return model(x).square().mean()


def u_shape(model: nn.Module, x: Tensor, number: int) -> Tensor:
    first = torch.tanh(model.a(x))
    second = torch.tanh(model.b(first))
    return (model.d(torch.tanh(model.c(second)) + first) * second).mean()


def ping_pong(model: nn.Module, x: Tensor, number: int) -> Tensor:
    for name in "abcd":
        x = torch.tanh(getattr(model, name)(x))
    return x.square().sum()


def tied_head(model: nn.Module, x: Tensor, number: int) -> Tensor:
    ids = (x * 10).long().abs() % 6
    h = model.b(torch.tanh(model.a(model.emb(ids))))
    logits = F.linear(h, model.emb.weight)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
