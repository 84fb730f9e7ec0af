"""Against torch's own loss in float64, whole and split, on the CPU and (marked gpu) on CUDA."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_smp.errors import UnsupportedError
from lightning_smp.native.kernels import cross_entropy as module
from lightning_smp.native.kernels.cross_entropy import (
    CrossEntropySettings,
    Statistics,
    backward_,
    cross_entropy,
    local_statistics,
    merge_statistics,
)
from tests.native.devices import devices

_DEVICES = devices("cross_entropy_statistics")
on_devices = pytest.mark.parametrize("device", _DEVICES)
only_cuda = pytest.mark.parametrize("device", _DEVICES[1:])

# Rounding of the gradient, and of sums in float32.
_TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (2**-8, 1e-6),
    torch.float16: (2**-10, 2**-22),
}
_SHAPES = [(5, 1), (7, 33), (3, 257), (4, 4099), (2, 70001), (0, 16)]


def _logits(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 4
    return values.to(device, dtype)


def _targets(rows: int, columns: int, device: str) -> Tensor:
    targets = torch.randint(0, columns, (rows,), generator=torch.Generator().manual_seed(1))
    targets[1:2] = -100
    return targets.to(device)


def _expected(logits: Tensor, targets: Tensor, grad: Tensor, smoothing: float) -> list[Tensor]:
    x = logits.detach().cpu().double().requires_grad_()
    loss = F.cross_entropy(x, targets.cpu(), label_smoothing=smoothing, reduction="none")
    (gradient,) = torch.autograd.grad(loss, x, grad.cpu().double())
    return [loss.detach(), gradient]


def _check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = _TOLERANCE[dtype]
    torch.testing.assert_close(actual.detach().cpu().double(), expected, rtol=rtol, atol=atol)


@on_devices
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=str)
def test_equals_torch(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    for smoothing in (0.0, 0.1):
        _check_against_torch(dtype, shape, smoothing, device)


def _check_against_torch(
    dtype: torch.dtype, shape: tuple[int, int], smoothing: float, device: str
) -> None:
    logits = _logits(*shape, dtype, device).requires_grad_()
    targets = _targets(*shape, device)
    grad = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    loss_expected, gradient_expected = _expected(logits, targets, grad, smoothing)

    settings = CrossEntropySettings(0, shape[1], label_smoothing=smoothing)
    loss = cross_entropy(logits, targets, settings, overwrite_logits=False)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward(grad.to(loss.dtype))

    _check(loss, loss_expected, torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.grad is not None
    _check(logits.grad, gradient_expected, dtype)


@on_devices
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("cuts", [(0, 17, 17, 40, 101), (0, 101, 101)], ids=str)
def test_parts_of_the_vocabulary_join_to_the_whole(
    cuts: tuple[int, ...], smoothing: float, device: str
) -> None:
    logits, targets = _logits(9, 101, torch.float64, device), _targets(9, 101, device)
    grad = torch.linspace(-1, 1, 9, dtype=torch.float64, device=device)
    loss_expected, gradient_expected = _expected(logits, targets, grad, smoothing)
    parts = [logits[:, a:b].clone() for a, b in pairwise(cuts)]
    settings = [CrossEntropySettings(a, 101, label_smoothing=smoothing) for a in cuts[:-1]]

    packed = [local_statistics(x, targets, s).packed for x, s in zip(parts, settings, strict=True)]
    merged = merge_statistics(torch.stack(packed))
    lse = merged.logsumexp()
    _check(merged.losses(targets, settings[0], lse), loss_expected, torch.float64)
    for part, of_part in zip(parts, settings, strict=True):
        backward_(part, targets, lse, grad, of_part)
    _check(torch.cat(parts, 1), gradient_expected, torch.float64)


@on_devices
def test_merge_is_called_with_the_local_statistics(device: str) -> None:
    logits = _logits(4, 20, torch.float64, device)
    targets = torch.tensor([0, 5, 19, 12], device=device)
    other = local_statistics(logits[:, 8:], targets, CrossEntropySettings(8, 20))

    def merge(mine: Statistics) -> Statistics:
        return merge_statistics(torch.stack([other.packed, mine.packed]))

    left = logits[:, :8].clone().requires_grad_()
    settings = CrossEntropySettings(0, 20)
    loss = cross_entropy(left, targets, settings, merge=merge, overwrite_logits=False)
    loss.sum().backward()
    loss_expected, gradient = _expected(logits, targets, torch.ones(4), 0.0)
    _check(loss, loss_expected, torch.float64)
    assert left.grad is not None
    _check(left.grad, gradient[:, :8], torch.float64)


@on_devices
@pytest.mark.parametrize("columns", [50, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_begin_anywhere(dtype: torch.dtype, columns: int, device: str) -> None:
    for offset in range(1, 9, 3):
        wide = _logits(6, columns + 13, dtype, device)
        before = wide.clone()
        logits = wide[:, offset : offset + columns]
        targets = _targets(6, columns, device)
        settings = CrossEntropySettings(0, columns)
        loss_expected, gradient = _expected(logits, targets, torch.ones(6), 0.0)
        statistics = local_statistics(logits, targets, settings)
        lse = statistics.logsumexp()
        _check(statistics.losses(targets, settings, lse), loss_expected, torch.float32)
        backward_(logits, targets, lse, torch.ones(6, device=device), settings)
        _check(logits, gradient, dtype)
        assert torch.equal(wide[:, :offset], before[:, :offset])
        assert torch.equal(wide[:, offset + columns :], before[:, offset + columns :])


@on_devices
@pytest.mark.parametrize("columns", [40, 4500])
def test_infinite_and_undefined_logits(columns: int, device: str) -> None:
    logits = _logits(5, columns, torch.float32, device)
    logits[0, ::2] = -math.inf  # masked classes
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3, 5] = math.nan  # ignored
    targets = torch.tensor([1, 1, 1, -100, 1], device=device)
    settings = CrossEntropySettings(0, columns)
    statistics = local_statistics(logits, targets, settings)
    lse = statistics.logsumexp()
    losses = statistics.losses(targets, settings, lse).tolist()
    clean = F.cross_entropy(logits[[0, 4]].double().cpu(), targets[[0, 4]].cpu(), reduction="none")
    assert losses[0] == pytest.approx(clean[0].item(), rel=1e-5)
    assert losses[4] == pytest.approx(clean[1].item(), rel=1e-5)
    assert math.isnan(losses[1])
    assert math.isnan(losses[2])
    assert losses[3] == 0.0

    backward_(logits, targets, lse, torch.ones(5, device=device), settings)
    assert bool(logits[[0, 4]].isfinite().all())
    assert bool(logits[1].isnan().all())
    assert not logits[3].any()
    assert not logits[0, ::2].any()


@on_devices
def test_a_part_of_masked_classes_only_does_not_count(device: str) -> None:
    logits, targets = _logits(3, 12, torch.float64, device), torch.tensor([0, 2, 3], device=device)
    logits[:, 4:] = -math.inf
    parts = [
        local_statistics(logits[:, a:b], targets, CrossEntropySettings(a, 12)).packed
        for a, b in ((0, 4), (4, 12))
    ]
    merged = merge_statistics(torch.stack(parts))
    expected = logits[:, :4].logsumexp(1)
    torch.testing.assert_close(merged.logsumexp(), expected)
    nothing = merge_statistics(torch.stack(parts[1:]))
    assert nothing.logsumexp().tolist() == [-math.inf] * 3


@on_devices
def test_overwriting_leaves_the_gradient_in_the_logits(device: str) -> None:
    hidden = _logits(6, 8, torch.float64, device).requires_grad_()
    weight = _logits(30, 8, torch.float64, device, seed=3).requires_grad_()
    targets, settings = _targets(6, 30, device), CrossEntropySettings(0, 30)

    logits = hidden @ weight.t()
    loss = cross_entropy(logits, targets, settings, overwrite_logits=True).sum()
    loss.backward(retain_graph=True)
    _, expected = _expected((hidden @ weight.t()), targets, torch.ones(6), 0.0)
    _check(logits, expected, torch.float64)
    _check(hidden.grad, expected @ weight.detach().cpu(), torch.float64)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_devices
def test_another_use_of_overwritten_logits_is_refused(device: str) -> None:
    weight = _logits(6, 30, torch.float64, device).requires_grad_()
    logits = weight * 2
    loss = cross_entropy(
        logits, _targets(6, 30, device), CrossEntropySettings(0, 30), overwrite_logits=True
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logits.square().sum() + loss).backward()


@on_devices
def test_gradcheck(device: str) -> None:
    logits = _logits(4, 11, torch.float64, device).requires_grad_()
    targets = _targets(4, 11, device)
    settings = CrossEntropySettings(0, 11, label_smoothing=0.3)

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x, targets, settings, overwrite_logits=False)

    assert torch.autograd.gradcheck(loss, (logits,))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_operators_are_declared_right(dtype: torch.dtype, device: str) -> None:
    logits, targets = _logits(5, 20, dtype, device), _targets(5, 20, device)
    packed = module._statistics(logits, targets, 0, 20, -100, True)
    statistics = (logits, targets, 0, 20, -100, True)
    torch.library.opcheck(module._statistics, statistics)
    lse = Statistics(packed).logsumexp()
    backward = (logits, targets, lse, torch.ones_like(lse), 0, 20, -100, 0.1)
    torch.library.opcheck(module._backward_, backward)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned in memory of its own."""

    def __init__(self, allowed: set[int]) -> None:
        super().__init__()
        self.allowed, self.elements = allowed, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.allowed:
            self.elements = max(self.elements, result.untyped_storage().nbytes())
        return result


def test_the_reference_has_no_temporary_of_the_size_of_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1000)
    logits, targets = _logits(200, 100, torch.bfloat16, "cpu"), _targets(200, 100, "cpu")
    with _Largest({logits.untyped_storage().data_ptr()}) as largest:
        packed = module._reference_statistics(logits, targets, 0, 100, -100, True)
        lse = Statistics(packed).logsumexp()
        module._reference_backward_(logits, targets, lse, lse * 0 + 1, 0, 100, -100, 0.1)
    assert 0 < largest.elements <= 4 * 1000  # float32 of one chunk; the logits have 40,000 bytes


def test_a_target_that_is_no_class_is_an_error() -> None:
    logits = _logits(2, 5, torch.float32, "cpu")
    for bad in (5, -1):
        with pytest.raises(IndexError, match=f"Target {bad} is no class: classes are 0 to 4"):
            local_statistics(logits, torch.tensor([1, bad]), CrossEntropySettings(0, 5))


def test_what_does_not_fit_is_refused() -> None:
    logits, targets = _logits(2, 6, torch.float32, "cpu"), torch.tensor([1, 2])
    settings = CrossEntropySettings(0, 6)
    with pytest.raises(UnsupportedError, match=r"met \[2, 3, 2\] of torch.float32"):
        local_statistics(logits.view(2, 3, 2), targets, settings)
    with pytest.raises(UnsupportedError, match="not probabilities"):
        local_statistics(logits, targets.float(), settings)
    with pytest.raises(UnsupportedError, match="no gaps"):
        local_statistics(logits.view(6, 2).t(), targets, settings)
    with pytest.raises(UnsupportedError, match="does not lie inside the whole of 6"):
        local_statistics(logits, targets, CrossEntropySettings(1, 6))
    with pytest.raises(UnsupportedError, match="rows overlap"):
        backward_(logits[:1].expand(2, 6), targets, torch.ones(2), torch.ones(2), settings)


@only_cuda
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("columns", [100_003, 1_000_000])
def test_few_long_rows_are_cut_into_parts(columns: int, rows: int, device: str) -> None:
    logits = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 3
    targets = torch.randint(0, columns, (rows,), device=device)
    settings = CrossEntropySettings(0, columns, label_smoothing=0.1)
    statistics = local_statistics(logits, targets, settings)
    loss = statistics.losses(targets, settings, statistics.logsumexp())
    expected = F.cross_entropy(logits.double(), targets, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@only_cuda
def test_two_to_the_31_elements_without_a_temporary(device: str) -> None:
    rows, columns = 16385, 131072
    logits = torch.empty(rows, columns, device=device, dtype=torch.bfloat16).normal_()
    targets = torch.randint(0, columns, (rows,), device=device)
    some = [0, 1, 8000, rows - 2, rows - 1]
    _, gradient = _expected(logits[some], targets[some], torch.ones(5), 0.0)
    settings = CrossEntropySettings(0, columns)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lse = local_statistics(logits, targets, settings).logsumexp()
    backward_(logits, targets, lse, torch.ones(rows, device=device), settings)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    _check(logits[some], gradient, torch.bfloat16)


_BAD_TARGET = """
import sys, torch
for library in sys.argv[1:]:
    torch.ops.load_library(library)
from lightning_smp.native.kernels.cross_entropy import CrossEntropySettings, local_statistics
logits = torch.randn(4, 10, device="cuda")
local_statistics(logits, torch.tensor([1, 2, 10, 3], device="cuda"), CrossEntropySettings(0, 10))
torch.cuda.synchronize()
"""


@only_cuda
def test_a_target_that_is_no_class_stops_the_device(device: str) -> None:
    command = [sys.executable, "-c", _BAD_TARGET, *sorted(torch.ops.loaded_libraries)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert result.returncode != 0
    assert "target_is_a_class" in result.stdout + result.stderr
    assert "device-side assert" in result.stderr
