"""A model, its data, and the same training on one device, for scenarios of the script API."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_smp as smp

__all__ = ["BATCH", "STEPS", "Net", "assert_weights", "batches", "fresh", "reference"]

BATCH = 8
STEPS = 3


class Norm(nn.LayerNorm):
    """Calls its base class as SMP's guide says."""

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = super()._orig_forward(input)  # type: ignore[misc]
        return found


class Net(nn.Module):
    """Six units, LayerNorm between them, and a head that may be tied to the first."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(4)
        )
        self.norm = Norm(6)
        self.head = nn.Linear(6, 6, bias=False)
        if tied:
            self.head.weight = self.inp.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        h = self.inp(x)
        for layer in self.layers:
            h = h + layer(h)
        logits = self.head(self.norm(h))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "pair": (h, logits)}


def fresh(net: nn.Module | None = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any, Any]:
    """A new distributed model, its optimizer, and a copy of the module as it was."""
    gc.collect()  # the scenario before may have left its model in cycles
    if net is None:
        torch.manual_seed(1)
        net = Net().double()
    plain = deepcopy(net).to(smp.state.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr / 10)  # before the model, as MNIST does
    model = smp.DistributedModel(net, **options)
    return model, smp.DistributedOptimizer(optimizer), plain


def batches(steps: int, replica: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """The batches of a replica, by default of this one."""
    replica = smp.dp_rank() if replica is None else replica
    generator = torch.Generator().manual_seed(100 + replica)
    found = [
        (
            torch.randn(BATCH, 6, generator=generator, dtype=torch.double),
            torch.randint(0, 6, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]
    return [(x.to(smp.state.device), y.to(smp.state.device)) for x, y in found]


def reference(
    net: nn.Module, steps: int, *, lr: float = 0.1, factor: float = 1.0, accumulate: int = 1,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    replicas: Sequence[Sequence[tuple[Tensor, Tensor]]] | None = None, clip: float | None = None,
) -> list[float]:  # fmt: skip
    """Trains on one device; returns this replica's losses.

    Args:
        factor: of every gradient.
        accumulate: steps until an update.
        replicas: the batches of each replica; gradients are the mean over replicas.
    """

    def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x, labels=y)["loss"]

    loss_of = loss_of or plain_loss
    replicas = replicas or [batches(steps, r) for r in range(smp.dp_size())]
    optimizer = torch.optim.Adam(net.parameters(), lr=lr / 10)
    losses = []
    for step in range(steps):
        mine = [loss_of(net, *data[step]) for data in replicas]
        losses.append(float(mine[smp.dp_rank()].detach()))
        (sum(mine) * factor / len(replicas)).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_weights(model: Any, plain: nn.Module) -> None:
    """Compares all weights of a distributed model with those of a module, on every rank."""
    whole = model.state_dict()
    assert list(whole) == list(plain.state_dict())
    for name, expected in plain.state_dict().items():
        found = whole[name].to(expected.device)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=name)
