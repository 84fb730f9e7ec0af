"""Deferred construction with a GPU: built on the host or on it, values are the eager ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_smp.deferred import deferring, is_deferred, realize_module
from tests.deferred.models import MODELS, assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(300, 200), nn.Embedding(5000, 333), nn.LSTM(10, 20))
    nn.init.trunc_normal_(model[0].weight)
    nn.init.orthogonal_(model[2].weight_hh_l0)
    model.append(nn.ParameterList([nn.Parameter(torch.empty(99).exponential_())]))
    return model


@pytest.mark.parametrize("name", ["layers", "initialisers", "tied", "copies"])
def test_built_on_the_host_for_the_device(name: str) -> None:
    torch.manual_seed(3)
    eager = MODELS[name]()
    torch.manual_seed(3)
    with deferring():
        model = MODELS[name]()
    had_no_memory = {key for key, value in model.state_dict().items() if is_deferred(value)}
    realize_module(model, torch.device("cuda"))
    for key, found in model.state_dict().items():
        assert found.is_cuda == (key in had_no_memory)
        assert torch.equal(found.cpu(), eager.state_dict()[key]), key


def test_built_on_the_device() -> None:
    def built(*, delayed: bool) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(3)
        with torch.device("cuda"):
            if not delayed:
                return _model(), torch.cuda.get_rng_state()
            with deferring():
                return _model(), torch.cuda.get_rng_state()

    eager, eager_state = built(delayed=False)
    held = torch.cuda.memory_allocated()
    model, state = built(delayed=True)
    assert all(is_deferred(p) for p in model.parameters())
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(state, eager_state)
    realize_module(model)
    for (key, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert_same(found, expected, key)
    model[2](torch.ones(1, 10, device="cuda"))[0].sum().backward()
    assert model[2].weight_hh_l0.grad is not None
