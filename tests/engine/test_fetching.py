"""Numbers of placed tensors on every rank: with the message that ends a step, or in one more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_smp.engine.fetching import Fetching
from lightning_smp.placed.tensor import PlacedTensor, Value, spec_of
from lightning_smp.program import EVERYWHERE

_CPU = torch.device("cpu")


class _Line:
    """Stands in for the messages of two ranks; the home of a tensor must go first."""

    device = _CPU

    def __init__(self, *, is_direct: bool = False) -> None:
        self.is_direct = is_direct
        self.sent: list[Tensor] = []
        self.shared = 0

    def share(self, tensor: Tensor, stage: int) -> None:
        if self.sent:
            tensor.copy_(self.sent.pop())
            self.shared += 1
        else:
            self.sent.append(tensor.clone())


def _placed(real: Tensor, home: int, rank: int) -> PlacedTensor:
    value = Value(None, 0, home, (max(home, 0), 0))  # type: ignore[arg-type]
    value.local = real if home in (rank, EVERYWHERE) else None
    return PlacedTensor(spec_of(real, _CPU), _CPU, value)


_NOBODY: Any = None


def _fetch(
    reals: list[Tensor], homes: list[int], *, offered: bool, is_direct: bool = False
) -> tuple[list[Any], int]:
    """What rank 1 gets of tensors that are real on rank 0 or on all; how many messages it took.

    ``is_direct``: the messages are those of the devices; there are none of the hosts.
    """
    line: Any = _Line(is_direct=is_direct)
    control = _NOBODY if is_direct else line
    ranks = [Fetching(rank, control, line) for rank in range(2)]
    asked = [
        [_placed(real, home, rank) for real, home in zip(reals, homes, strict=True)]
        for rank in range(2)
    ]
    if offered:
        offers = [fetching.offer(tensors) for fetching, tensors in zip(ranks, asked, strict=True)]
        for fetching in ranks:
            fetching.accept(offers)
    return [f.fetch(tensors) for f, tensors in zip(ranks, asked, strict=True)][1], line.shared


_SETS = {
    "losses": [torch.tensor(1.5), torch.tensor(-2.0), torch.tensor(0.25)],
    "types": [torch.tensor([True]), torch.ones((), dtype=torch.float64), torch.ones(2, 3).half()],
    "alike": [torch.tensor([True, False]), torch.tensor([False, True]).flip(0)],
    "conjugates": [torch.tensor(1 + 2j).conj(), torch.tensor(3 - 1j)],
    "strides": [torch.arange(6.0).view(2, 3).t(), torch.arange(6).view(3, 2)],
    "one": [torch.tensor([4], dtype=torch.uint16)],
    "none": [torch.empty(0, 4)],
    "none and one": [torch.empty(0, 4), torch.tensor([1 + 2j])],
}  # fmt: skip


@pytest.mark.parametrize("way", ["offered", "asked for", "device to device"])
@pytest.mark.parametrize("name", list(_SETS))
def test_every_rank_gets_the_numbers(name: str, way: str) -> None:
    reals = _SETS[name]
    found, messages = _fetch(
        reals, [0] * len(reals), offered=way != "asked for", is_direct=way == "device to device"
    )
    for got, real in zip(found, reals, strict=True):
        assert type(got) is Tensor
        assert got.dtype == real.dtype
        assert torch.equal(got, real)
    has_numbers = any(real.numel() for real in reals)
    assert messages == (1 if has_numbers and way != "offered" else 0)


def test_many_numbers_get_a_message_of_their_own() -> None:
    reals = [torch.randn(40, 40), torch.randn(3)]
    found, messages = _fetch(reals, [0, EVERYWHERE], offered=True)
    assert all(map(torch.equal, found, reals))
    assert messages == 1


def test_an_offer_is_for_these_tensors_and_this_step_only() -> None:
    line: Any = _Line()
    fetching = Fetching(0, line, line)
    one, other = (_placed(torch.tensor(x), 0, 0) for x in (1.0, 2.0))
    fetching.accept([fetching.offer([one]), b""])
    assert fetching.fetch([other])[0].item() == 2.0
    assert len(line.sent) == 1  # not what was offered: rank 1 must be told
    fetching.accept([fetching.offer([one]), b""])
    fetching.forget()
    assert fetching.fetch([one])[0].item() == 1.0
    assert len(line.sent) == 0
