"""`smp.delay_param_initialization` and `smp.model_creation`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lightning_smp as smp
from lightning_smp.deferred import is_deferred, realize_module
from lightning_smp.errors import ConfigError
from tests.deferred.models import assert_same, built_twice


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Embedding(4, 3))


def test_delay_gives_the_same_weights() -> None:
    eager, model = built_twice(_model, smp.delay_param_initialization())
    assert all(is_deferred(p) for p in model.parameters())
    realize_module(model)
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert_same(found, expected, name)


def test_delay_can_be_switched_off() -> None:
    with smp.delay_param_initialization(enabled=False):
        model = _model()
    assert not any(is_deferred(p) for p in model.parameters())


def test_model_creation_delays_in_a_dtype() -> None:
    def in_bfloat16() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return _model()
        finally:
            torch.set_default_dtype(torch.float32)

    torch.manual_seed(3)
    eager = in_bfloat16()
    torch.manual_seed(3)
    with smp.model_creation(dtype=torch.bfloat16, fused_softmax=True):
        model = _model()
    assert torch.get_default_dtype() is torch.float32
    realize_module(model)
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert found.dtype is torch.bfloat16
        assert_same(found, expected, name)


@pytest.mark.parametrize("dtype", [torch.int64, "float16"])
def test_a_dtype_that_no_parameter_can_have(dtype: object) -> None:
    with (
        pytest.raises(ConfigError, match="must be a floating-point type"),
        smp.model_creation(dtype=dtype),
    ):
        pass
