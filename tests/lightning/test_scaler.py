import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.amp import AgreedGradScaler, make_scaler
from tests.support.launch import gloo_group, run_ranks

_CPU = torch.device("cpu")
_Report = list[tuple[float, bool]]


def _steps(rank: int, world_size: int, *, fused: bool, explicit: bool) -> _Report:
    """Per step the scale after it and whether this rank's weight changed.

    Rank 1 never has a gradient in the last two steps; overflows happen on one rank only.
    """
    with gloo_group():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
        plain = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        scaler = make_scaler(plain, dist.group.WORLD, _CPU)
        report = []
        for step in range(6):
            before = weight.detach().clone()
            optimizer.zero_grad()
            loss = (weight * 2).sum()
            if step < 4 or rank == 0:
                scaler.scale(loss).backward()
            if step == 1 and rank == 1:
                weight.grad[0] = torch.inf
            if step == 5 and rank == 0:
                weight.grad[1] = torch.nan
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            report.append((scaler.get_scale(), not torch.equal(before, weight)))
        return report


def _implicit(rank: int, world_size: int) -> _Report:
    return _steps(rank, world_size, fused=False, explicit=False)


def _explicit(rank: int, world_size: int) -> _Report:
    return _steps(rank, world_size, fused=False, explicit=True)


def _fused(rank: int, world_size: int) -> _Report:
    return _steps(rank, world_size, fused=True, explicit=False)


@pytest.mark.parametrize("run", [_implicit, _explicit, _fused])
def test_all_ranks_step_or_skip_together(run: object) -> None:
    first, second = run_ranks(run, 2, timeout=60)  # type: ignore[arg-type]
    scales = [64.0, 32.0, 32.0, 64.0, 64.0, 32.0]
    stepped = [True, False, True, True, True, False]
    assert first == list(zip(scales, stepped, strict=True))
    stepped[4] = False  # no gradient there, nothing to change
    assert second == list(zip(scales, stepped, strict=True))


def _never_scaled(rank: int, world_size: int) -> float:
    with gloo_group():
        scaler = AgreedGradScaler(dist.group.WORLD, _CPU, init_scale=8.0)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight])
        if rank == 0:
            scaler.scale(weight.sum()).backward()
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()


def test_a_rank_that_never_scaled_a_loss_takes_part() -> None:
    assert run_ranks(_never_scaled, 2, timeout=60) == [4.0, 4.0]


def test_keeps_hyper_parameters_and_state() -> None:
    plain = torch.amp.GradScaler(
        "cpu", init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5
    )
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    plain.scale(weight.sum()).backward()
    plain.step(optimizer)
    plain.update()
    scaler = make_scaler(plain, None, _CPU)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.state_dict() == plain.state_dict()
    assert scaler.state_dict()["_growth_tracker"] == 1
    plain.load_state_dict(scaler.state_dict())


def test_a_disabled_scaler_stays_disabled() -> None:
    scaler = make_scaler(torch.amp.GradScaler("cpu", enabled=False), None, _CPU)
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}


def test_half_precision_gradients_are_refused_as_in_torch() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = AgreedGradScaler(None, _CPU)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
