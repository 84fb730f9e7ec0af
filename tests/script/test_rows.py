"""Rows of SMP's documented behaviour that need no several ranks: arguments, loss scales, places."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_smp as smp
from lightning_smp.script.half import LossScale
from lightning_smp.script.launch import Place
from lightning_smp.script.starting import _device
from tests.support.launch import run_ranks


def _values(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; "x" overflows."""
    found = []
    for step in overflows:
        scale.update(overflow=step == "x")
        found.append(scale.value)
    return found


def test_loss_scale_has_the_documented_defaults() -> None:
    scale = LossScale()
    assert scale.value == 2.0**32
    assert (scale.scale_factor, scale.scale_window, scale.min_scale) == (2.0, 1000, 1)
    assert (scale.delayed_shift, scale.consecutive_hysteresis) == (1, False)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"init_scale": 8.0, "scale_window": 2}, "..x..", [8, 16, 8, 8, 16]),
        ({"init_scale": 9.0, "scale_factor": 3.0, "min_scale": 2.0}, "xxx", [3, 2, 2]),
        ({"init_scale": 8.0, "delayed_shift": 2}, "x.xx", [8, 8, 4, 2]),
        (
            {"init_scale": 8.0, "delayed_shift": 2, "consecutive_hysteresis": True},
            "x.xx", [8, 8, 8, 4],
        ),
        ({"init_scale": 8.0, "is_dynamic": False}, "xx", [8, 8]),
    ],
)  # fmt: skip
def test_loss_scale_follows_overflows(
    options: dict[str, Any], steps: str, expected: list[float]
) -> None:
    assert _values(LossScale(**options), steps) == expected


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({}, 1.0),
        ({"static_loss_scale": 4.0}, 4.0),
        ({"static_loss_scaling": 4.0}, 4.0),
        ({"static_loss_scale": None, "dynamic_loss_scale": True}, 2.0**32),
        ({"dynamic_loss_scaling": True, "init_scale": 16}, 16.0),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 32}}, 32.0),
    ],
)
def test_both_spellings_of_the_loss_scale(given: dict[str, Any], scale: float) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = smp.DistributedOptimizer(inner, **given)
    assert optimizer._scale.value == scale
    assert optimizer.loss_scale == 1.0  # without fp16 it has no effect
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
    with pytest.raises(smp.UnsupportedError, match="clip_grad_norm_"):
        optimizer.clip_master_grads(1.0)


def test_more_processes_than_gpus_are_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RuntimeError, match="8 processes were started on this node, which has 4"):
        _device(Place(0, 8, 0, 8))


def test_what_needs_init_says_so() -> None:
    for call in (smp.num_microbatches, smp.rank, smp.barrier, smp.get_mp_group):
        with pytest.raises(smp.SMPError, match=r"smp\.init\(\)"):
            call()
    with pytest.raises(smp.SMPError, match=r"smp\.init\(\)"):
        smp.DistributedModel(nn.Linear(2, 2))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()


def rows(rank: int, size: int, folder: str) -> None:
    smp.init(
        {
            "partitions": 2, "microbatches": 4, "skip_tracing": True, "active_microbatches": 1,
            "deterministic_server": True, "optimize": "speed", "memory_weight": 0.5,
        }
    )  # fmt: skip
    for given, words in (
        ({"trace_device": "tpu"}, "trace_device='tpu'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
    ):
        with pytest.raises(smp.ConfigError, match=words):
            smp.DistributedModel(_net(), **given)
    model = smp.DistributedModel(
        _net(), trace_device="cpu", trace_execution_times=True, trace_memory_usage=True,
        gradient_as_bucket_view=True, find_unused_parameters=True,
    )  # fmt: skip
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    traced = []

    @smp.step
    def train(x: torch.Tensor) -> torch.Tensor:
        traced.append(smp.is_tracing())
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
    train(x.to(smp.state.device))
    optimizer.step()
    assert not any(traced)  # skip_tracing
    assert len(list(model.local_parameters())) == 4
    plain = _net()
    plain(x).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), plain.state_dict()[name])
    local = optimizer.local_state_dict(gather_if_shard=False)
    assert local["_smp_is_partial"] is True
    assert optimizer.orig_state_dict().keys() == {"state", "param_groups"}
    path = f"{folder}/whole.pt"
    smp.save({"word": [1]}, path, partial=False, pickle_module=pickle, pickle_protocol=4)
    smp.barrier()
    assert smp.load(path, partial=False, pickle_module=pickle) == {"word": [1]}


def test_keys_and_arguments_over_two_stages(tmp_path: Path) -> None:
    run_ranks(rows, 2, str(tmp_path))
