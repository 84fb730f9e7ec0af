"""The stand-in for a unit's forward: installed, removed, called outside of steps, observed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.units import UnitEntry


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.penalty: Any = None
        self.cached: Any = None
        self.name = ""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.penalty, self.cached, self.name = y.sum(), {"y": [y]}, "called"
        return y


def entry_of(module: nn.Module, *, stage: int = 0, rank: int = 0) -> UnitEntry:
    runtime = Runtime(rank, 2, torch.device("cpu"))
    return UnitEntry(runtime, 3, "net.unit", module, stage, 0.0)


def test_installed_and_removed() -> None:
    module = nn.Linear(2, 2)
    entry = entry_of(module)
    entry.install()
    assert module.forward == entry.enter
    entry.remove()
    assert "forward" not in module.__dict__


def test_forward_of_the_instance_comes_back() -> None:
    module = nn.Linear(2, 2)
    own = module.__dict__["forward"] = lambda x: x
    entry = entry_of(module)
    entry.install()
    entry.remove()
    assert module.__dict__["forward"] is own


def test_backward_hooks_belong_inside() -> None:
    module = nn.Linear(2, 2)
    module.register_full_backward_hook(lambda *_: None)
    entry = entry_of(module)
    entry.install()
    assert "forward" not in module.__dict__
    with pytest.raises(UnsupportedError, match=r"net\.unit"):
        entry_of(module, rank=1).enter(torch.ones(1, 2))
    entry.remove()
    assert module._compiled_call_impl is None


def test_direct_call_on_its_own_stage_and_elsewhere() -> None:
    module = nn.Linear(2, 2)
    expected = module(torch.ones(1, 2))
    entry_of(module).install()
    assert torch.equal(module(torch.ones(1, 2)), expected)
    entry_of(nn.Linear(2, 2), stage=-1, rank=1).enter(torch.ones(1, 2))
    other = nn.Linear(2, 2)
    entry_of(other, rank=1).install()
    with pytest.raises(UnsupportedError, match="stage 0, was called outside of a step on stage 1"):
        other(torch.ones(1, 2))


def test_copies_are_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    entry_of(module).install()
    with pytest.raises(UnsupportedError, match=r"copy\.deepcopy of 'net\.unit'"):
        copy.deepcopy(module)
    with pytest.raises(UnsupportedError, match=r"'net\.unit' cannot be pickled"):
        pickle.dumps(module)


def test_token_changes_with_the_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    entry = entry_of(module)
    tokens = [entry.token]
    module[0].weight.requires_grad_(False)
    tokens.append(entry.token)
    module[1].eval()
    tokens.append(entry.token)
    module.train()
    module[0].weight.requires_grad_(True)
    assert len(set(tokens)) == 3
    assert entry.token == tokens[0]


def test_tensors_left_in_attributes_are_observed() -> None:
    module = Leaving()
    entry = entry_of(module)
    entry.run((torch.ones(1, 2),), {}, observe=True)
    assert [(path, name) for path, name, _ in entry.observed()] == [("", "penalty"), ("", "cached")]
    held = entry.collect((("", "penalty", None),))
    assert held[0] is module.penalty


def test_planted_values_stand_in_attributes() -> None:
    module = Leaving()
    entry = entry_of(module)
    entry.plant((("", "cached", ["d", [["y", ["l", [["t", 0]]]]]]),), ["leaf"], [])
    assert module.cached == {"y": ["leaf"]}
