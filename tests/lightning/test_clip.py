import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_smp.errors import UnsupportedError
from lightning_smp.weights.clip import clip_grad_norm, global_clip, grad_norm
from lightning_smp.weights.ownership import Ownership, release
from tests.support.launch import gloo_group, run_ranks

_INF = math.inf


def _model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Stage 0: a; both: tied; stage 1: b; frozen has no gradient; stage 2 stays empty."""
    torch.manual_seed(3)
    model = nn.Module()
    model.a = nn.Linear(4, 3)
    model.tied = nn.Parameter(torch.randn(3, 2))
    model.b = nn.Linear(2, 3)
    model.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    return model.to(dtype)


def _give_gradients(model: nn.Module) -> None:
    torch.manual_seed(4)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, dtype=torch.float64) * 5
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter.dtype)


def _partitioned(model: nn.Module, rank: int) -> Ownership:
    """Gives gradients, then drops the foreign part: what a rank has after the backward."""
    stages = {
        "a.weight": (0,),
        "a.bias": (0,),
        "b.weight": (1,),
        "b.bias": (1,),
        "tied": (0, 1),
        "frozen": (0,),
    }
    ownership = Ownership(model, stages, pp_rank=rank, pp_size=3)
    release(model, ownership)
    return ownership


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _clip(
    rank: int, world_size: int, norm_type: float, max_norm: float, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = _model(dtype)
    _give_gradients(model)
    ownership = _partitioned(model, rank)
    with gloo_group():
        total = clip_grad_norm(
            iter(list(model.parameters())),
            max_norm,
            ownership,
            dist.group.WORLD,
            norm_type=norm_type,
        )
        return total, _grads(model)


@pytest.mark.parametrize(
    ("norm_type", "max_norm", "dtype", "rtol"),
    [
        (2.0, 1.0, torch.float64, 1e-14),
        (2.0, 1e6, torch.float64, 1e-14),
        (1.0, 1.0, torch.float32, 1e-6),
        (_INF, 0.5, torch.float32, 0.0),
        (3.5, 1.0, torch.float64, 1e-14),
        (2.0, 1.0, torch.bfloat16, 1e-2),
    ],
)
def test_clips_as_one_device(
    norm_type: float, max_norm: float, dtype: torch.dtype, rtol: float
) -> None:
    reference = _model(dtype)
    _give_gradients(reference)
    expected = clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    results = run_ranks(_clip, 3, norm_type, max_norm, dtype, timeout=60)
    assert set(results[0][1]) | set(results[1][1]) == set(_grads(reference))
    assert not results[2][1]
    for total, grads in results:
        torch.testing.assert_close(total.double(), expected.double(), rtol=rtol, atol=0)
        assert torch.equal(total, results[0][0])
        for name, grad in grads.items():
            want = reference.get_parameter(name).grad
            torch.testing.assert_close(grad, want, rtol=rtol, atol=0)
    assert torch.equal(results[0][1]["tied"], results[1][1]["tied"])


def _nonfinite(rank: int, world_size: int) -> None:
    model = _model()
    _give_gradients(model)
    model.b.bias.grad[0] = math.nan  # on stage 1 only
    ownership = _partitioned(model, rank)
    with gloo_group():
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            clip_grad_norm(
                model.parameters(), 1.0, ownership, dist.group.WORLD, error_if_nonfinite=True
            )
        total = clip_grad_norm(model.parameters(), 1.0, ownership, dist.group.WORLD)
        assert total.isnan()
        with pytest.raises(UnsupportedError, match="above 0"):
            clip_grad_norm(model.parameters(), 1.0, ownership, dist.group.WORLD, norm_type=0)


def test_all_ranks_learn_of_a_nonfinite_norm() -> None:
    run_ranks(_nonfinite, 3, timeout=60)


def test_one_stage_is_torch() -> None:
    model = _model(torch.float32)
    _give_gradients(model)
    same = copy.deepcopy(model)
    _give_gradients(same)
    total = clip_grad_norm(model.parameters(), 1.0, Ownership.whole(model), None)
    assert torch.equal(total, clip_grad_norm_(same.parameters(), 1.0))
    assert all(torch.equal(grad, _grads(same)[name]) for name, grad in _grads(model).items())
    with global_clip(lambda: Ownership.whole(model), None):
        assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_


def _by_attribute(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _by_name(model: nn.Module) -> torch.Tensor:
    return clip_grad_norm_(model.parameters(), 1.0)


def _by_parts(model: nn.Module) -> torch.Tensor:
    grads = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
    return total


def _user_call(
    rank: int, world_size: int, call: Callable[[nn.Module], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = _model()
    _give_gradients(model)
    ownership = _partitioned(model, rank)
    with gloo_group():
        with global_clip(lambda: ownership, dist.group.WORLD):
            total = call(model)
        assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
        assert torch.nn.utils.get_total_norm is get_total_norm
        assert torch.nn.utils.clip_grad._get_total_norm is get_total_norm
        return total, _grads(model)


@pytest.mark.parametrize("call", [_by_attribute, _by_name, _by_parts])
def test_calls_of_the_user_give_the_global_norm(
    call: Callable[[nn.Module], torch.Tensor],
) -> None:
    reference = _model()
    _give_gradients(reference)
    expected = clip_grad_norm_(reference.parameters(), 1.0)
    for total, grads in run_ranks(_user_call, 3, call, timeout=60):
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=0)
        for name, grad in grads.items():
            want = reference.get_parameter(name).grad
            torch.testing.assert_close(grad, want, rtol=1e-14, atol=0)


def _other_tensors(rank: int, world_size: int) -> None:
    model = _model()
    _give_gradients(model)
    ownership = _partitioned(model, rank)
    alien = nn.Parameter(torch.ones(4))
    alien.grad = torch.full((4,), 2.0)
    with gloo_group(), global_clip(lambda: ownership, dist.group.WORLD):
        weights = torch.nn.utils.get_total_norm(model.parameters())
        expected = get_total_norm(_model().parameters())
        torch.testing.assert_close(weights, expected, rtol=1e-14, atol=0)

        assert torch.nn.utils.get_total_norm([torch.ones(4) * (rank + 1)]) == 2.0 * (rank + 1)
        assert torch.nn.utils.clip_grad_norm_([alien], 1.0) == 4.0
        torch.testing.assert_close(alien.grad, torch.full((4,), 0.5))

        with pytest.raises(UnsupportedError, match="separately"):
            torch.nn.utils.clip_grad_norm_([alien, *model.parameters()], 1.0)
        # Rank 2 has no gradients and sees only the alien one.
        with pytest.raises(UnsupportedError, match="separately"):
            torch.nn.utils.get_total_norm([alien.grad, *_grads(model).values()])


def test_tensors_that_are_no_gradients() -> None:
    run_ranks(_other_tensors, 3, timeout=60)


def _fail_inside(ownership: Ownership) -> None:
    with global_clip(lambda: ownership, object()):  # type: ignore[arg-type]
        assert torch.nn.utils.clip_grad_norm_ is not clip_grad_norm_
        raise ValueError("mine")


def test_attributes_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="mine"):
        _fail_inside(Ownership.whole(_model()))
    assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_


def _norms(rank: int, world_size: int, norm_type: float | str) -> dict[str, torch.Tensor]:
    model = _model()
    _give_gradients(model)
    ownership = _partitioned(model, rank)
    with gloo_group():
        return grad_norm(model, norm_type, ownership, dist.group.WORLD)


@pytest.mark.parametrize("norm_type", [1, 2.0, "inf"])
def test_grad_norm_as_lightning(norm_type: float | str) -> None:
    reference = _model()
    _give_gradients(reference)
    expected = lightning_grad_norm(reference, norm_type)
    for norms in run_ranks(_norms, 3, norm_type, timeout=60):
        assert list(norms) == list(expected)
        for key, value in norms.items():
            torch.testing.assert_close(value, expected[key].double(), rtol=1e-6, atol=0)


def test_grad_norm_without_gradients_is_empty() -> None:
    model = _model()
    assert grad_norm(model, 2.0, Ownership.whole(model), None) == {}
    assert grad_norm(nn.ReLU(), 2.0, Ownership.whole(model), None) == {}
