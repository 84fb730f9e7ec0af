"""Two small analyses tell of any number of samples; what a GPU fuses is one operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp.partitioning import (
    Analysis,
    Work,
    analyze,
    fake_batch,
    find_atoms,
    new_fake_mode,
)
from lightning_smp.partitioning.device import Kernel
from lightning_smp.planning import DEVICES, Profile, class_source
from lightning_smp.planning.as_gpu import AsGpu
from lightning_smp.planning.sources import Source

H200 = DEVICES["h200"].model()


def source(kind: str = "GPT") -> Source:
    return class_source(
        f"benchmarks.one_gpu:{kind}", inputs=["int64:64"], precision="bf16-mixed",
        arguments={"width": 128, "depth": 2, "heads": 2, "vocabulary": 1024, "length": 64},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["GPT", "Llama"])
@pytest.mark.parametrize("samples", [3, 16])
def test_any_number_of_samples_as_if_it_had_been_analysed(kind: str, samples: int) -> None:
    given = source(kind)
    _, profile = given.profile(H200)
    exact = given._analyze(find_atoms(given.root), H200, samples)
    for name, cost in profile.costs(samples).items():
        there = exact.work[name].cost(H200)
        assert cost.forward_s == pytest.approx(there.forward_s, rel=1e-6), name
        assert cost.backward_s == pytest.approx(there.backward_s, rel=1e-6), name
        assert cost.saved_bytes == pytest.approx(there.saved_bytes, abs=64), name
        # Of several moments another may be the fullest one.
        assert cost.temporary_bytes == pytest.approx(there.temporary_bytes, rel=0.2), name


def _is_in_block(name: str | None) -> bool:
    return name is not None and name.startswith("blocks.1")


def test_casts_of_weights_do_not_grow_with_samples() -> None:
    _, profile = source().profile(H200)
    one, two, four = (
        sum(c.saved_bytes for name, c in profile.costs(n).items() if _is_in_block(name))
        for n in (1, 2, 4)
    )
    weights = 2 * 12 * 128 * 128
    assert two - one == pytest.approx((four - two) / 2)
    assert one - (two - one) == pytest.approx(weights, rel=0.02)  # what no samples would keep


def test_tensor_ranks_share_work_but_not_launches() -> None:
    model = replace(H200, host_s=0.0)
    work = source()._analyze(find_atoms(source().root), model, 4).work["head"]
    launches = model.launch_s * len(work.forward)
    launches += model.ramp_s * sum(kernel.flops > 0 for kernel in work.forward)
    whole, half = work.cost(model).forward_s, work.cost(model, divided=2).forward_s
    assert half - launches == pytest.approx((whole - launches) / 2)


def test_where_kernels_differ_all_is_proportional_to_the_larger_run() -> None:
    copy, sums = Kernel("stream", moved=8e9), Kernel("rows", moved=4e9)
    few = Analysis((), {}, work={None: Work((copy, sums))})
    many = Analysis((), {}, work={None: Work((sums,), saved_bytes=100)})
    cost = Profile({2: few, 4: many}, replace(H200, launch_s=0.0)).costs(8)[None]
    assert cost.forward_s == pytest.approx(2 * H200.busy_seconds(sums))
    assert cost.saved_bytes == 200


def test_a_step_that_cannot_be_run_is_proportional() -> None:
    root = nn.Sequential(nn.Linear(4, 4))
    found = analyze(root, lambda copy: 1 / 0, find_atoms(root))
    assert found.reason
    costs = Profile({1: found}, H200).costs(8, divided=2)
    assert costs["0"].backward_s == pytest.approx(4 * found.costs["0"].backward_s)


def _as_gpu(root: nn.Module, batch: Tensor, *, autocast: bool = True) -> Analysis:
    atoms, mode = find_atoms(root), new_fake_mode()
    fake = fake_batch(batch, mode)

    def run(copy: nn.Module) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), AsGpu():
            return copy(fake)

    found = analyze(root, run, atoms, mode=mode)
    assert found.reason is None
    return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(self.layer(x), 3.0)


def test_attention_with_dropout_keeps_no_square() -> None:
    work = _as_gpu(nn.Sequential(Attention()), torch.zeros(1, 512, 64)).work["0"]
    assert work.saved_bytes < 512 * 512 * 2  # one head's, in 16 bits
    kinds = [kernel.kind for kernel in (*work.forward, *work.backward)]
    assert kinds.count("attention") == kinds.count("attention_backward") == 1


def test_dropout_keeps_a_mask_of_bytes() -> None:
    work = _as_gpu(nn.Sequential(Drop()), torch.zeros(128, 64)).work["0"]
    cast_input, mask = 2 * 128 * 64, 128 * 64
    assert work.saved_bytes == cast_input + mask


def test_powers_are_of_32_bits_under_autocast() -> None:
    work = _as_gpu(nn.Sequential(Chain()), torch.zeros(128, 64)).work["0"]
    cast_input, widened = 2 * 128 * 64, 4 * 128 * 64
    assert work.saved_bytes == cast_input + widened
