from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.errors import ScheduleError, UnsupportedError
from lightning_smp.weights.gradients import GradientReducer, GradientStore
from lightning_smp.weights.ownership import Ownership
from lightning_smp.weights.sharing import SharingGroups, WeightAgreement
from tests.support.launch import gloo_group, run_ranks

# Two stages, replicas interleaved: ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1.
_STAGE_RANKS = ((0, 2), (1, 3))
_WEIGHTS = (3.0, 5.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)  # stage 0
        self.tied = nn.Parameter(torch.zeros(4, 2))  # both
        self.last = nn.Conv2d(4, 2, 3)  # stage 1
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


_STAGES = {
    "first.weight": (0,),
    "first.bias": (0,),
    "last.weight": (1,),
    "last.bias": (1,),
}


def _partial(name: str, shape: torch.Size, stage: int, dp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 10 * stage + 100 * dp_rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _expected(name: str, shape: torch.Size, stages: Sequence[int]) -> torch.Tensor:
    parts = [
        weight * _partial(name, shape, stage, dp_rank)
        for dp_rank, weight in enumerate(_WEIGHTS)
        for stage in stages
    ]
    return torch.stack(parts).sum(0) / sum(_WEIGHTS)


def _groups(ownership: Ownership, stage_ranks: Sequence[Sequence[int]]) -> SharingGroups:
    return SharingGroups(ownership, stage_ranks, lambda ranks: dist.new_group(list(ranks)))


def _reduce_model(
    rank: int, world_size: int, bucket_bytes: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """One step on 2 x 2 ranks: returns the reduced gradients of this rank."""
    stage, dp_rank = rank % 2, rank // 2
    with gloo_group():
        model = Model().to(dtype)
        model.last.to(memory_format=torch.channels_last)
        ownership = Ownership(model, _STAGES, pp_rank=stage, pp_size=2)
        reducer = GradientReducer(
            ownership, _groups(ownership, _STAGE_RANKS), bucket_bytes=bucket_bytes
        )
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        for _ in range(2):  # a reducer serves many steps
            named = {n: model.get_parameter(n) for n in names}
            for name, p in named.items():
                p.grad = None
                if ownership.is_local(p):
                    p.grad = _partial(name, p.shape, stage, dp_rank).to(dtype)
            reducer.start(_WEIGHTS[dp_rank])
            # Ranks finish their gradients in different orders; some are left to finish().
            for name in names[rank:] + names[:rank]:
                if name != "tied" or rank != 1:
                    reducer.ready(named[name])
            reducer.finish()
        assert model.last.weight.stride() != model.last.weight.contiguous().stride()
        if stage == 1:
            assert model.last.weight.grad.stride() == model.last.weight.stride()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20])
def test_weighted_mean_over_replicas_and_sum_over_copies(bucket_bytes: int) -> None:
    results = run_ranks(_reduce_model, 4, bucket_bytes, torch.float64, timeout=60)
    for rank, gradients in enumerate(results):
        own = "first" if rank % 2 == 0 else "last"
        assert list(gradients) == [n for n, _ in Model().named_parameters() if n in gradients]
        assert set(gradients) == {"tied", f"{own}.weight", f"{own}.bias"}
        for name, gradient in gradients.items():
            stages = (0, 1) if name == "tied" else (rank % 2,)
            torch.testing.assert_close(
                gradient, _expected(name, gradient.shape, stages), rtol=1e-14, atol=1e-14
            )
    assert torch.equal(results[0]["tied"], results[3]["tied"])
    assert torch.equal(results[0]["first.weight"], results[2]["first.weight"])
    assert torch.equal(results[1]["last.weight"], results[3]["last.weight"])


def test_half_precision_stays_in_its_dtype() -> None:
    results = run_ranks(_reduce_model, 4, 2**20, torch.bfloat16, timeout=60)
    gradient = results[2]["first.weight"]
    assert gradient.dtype is torch.bfloat16
    expected = _expected("first.weight", gradient.shape, (0,))
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(results[1]["tied"], results[2]["tied"])


def _missing(rank: int, world_size: int) -> list[torch.Tensor | None]:
    with gloo_group():
        model = nn.Module()
        for name in "abcd":
            model.register_parameter(name, nn.Parameter(torch.zeros(2)))
        ownership = Ownership.whole(model)
        reducer = GradientReducer(ownership, _groups(ownership, [[0, 1]]), bucket_bytes=16)
        stash: dict[nn.Parameter, torch.Tensor] = {}
        if rank == 0:
            stash[model.a] = torch.ones(2)
        else:
            stash[model.b] = torch.ones(2) * 4
            stash[model.d] = torch.zeros(2)
        store = GradientStore(get=stash.get, set=stash.__setitem__)
        reducer = GradientReducer(
            ownership, _groups(ownership, [[0, 1]]), bucket_bytes=16, store=store
        )
        reducer.start(1.0)
        reducer.finish()
        assert all(p.grad is None for p in model.parameters())
        return [stash.get(p) for p in model.parameters()]


def test_gradient_present_on_one_member_reaches_all() -> None:
    for a, b, c, d in run_ranks(_missing, 2, timeout=60):
        assert torch.equal(a, torch.tensor([0.5, 0.5]))
        assert torch.equal(b, torch.tensor([2.0, 2.0]))
        assert c is None
        assert torch.equal(d, torch.zeros(2))


def _weights(rank: int, world_size: int) -> list[float]:
    """Steps with several weightings; NaN and large gradients included."""
    with gloo_group():
        model = nn.Linear(1, 1, bias=False).to(torch.float16)
        ownership = Ownership.whole(model)
        reducer = GradientReducer(ownership, _groups(ownership, [[0, 1]]))
        results = []
        for weights, values in [
            ((0.0, 2.0), (float("nan"), 3.0)),  # no samples here: its mean is NaN
            ((4.0, 4.0), (60000.0, 60000.0)),  # the plain sum would overflow
            ((None, None), (1.0, 2.0)),
        ]:
            model.weight.grad = torch.full((1, 1), values[rank], dtype=torch.float16)
            reducer.start(weights[rank])
            reducer.ready(model.weight)
            reducer.finish()
            results.append(model.weight.grad.item())
        for weights in [(0.0, 0.0), (-1.0, 2.0), (1.0, float("nan")), (float("inf"), 1.0)]:
            with pytest.raises(UnsupportedError, match=r"loss_weight"):
                WeightAgreement(weights[rank], dist.group.WORLD, 2, torch.device("cpu")).share()
        return results


def test_weights() -> None:
    assert run_ranks(_weights, 2, timeout=60) == [[3.0, 60000.0, 3.0]] * 2


def _sparse(rank: int, world_size: int) -> str:
    with gloo_group():
        model = nn.Embedding(4, 2, sparse=True)
        ownership = Ownership.whole(model)
        reducer = GradientReducer(ownership, _groups(ownership, [[0, 1]]))
        model(torch.tensor([1])).sum().backward()
        reducer.start(1.0)
        with pytest.raises(UnsupportedError) as caught:
            reducer.ready(model.weight)
        return str(caught.value)


def test_sparse_gradients_are_refused_by_name() -> None:
    for message in run_ranks(_sparse, 2, timeout=60):
        assert "'weight'" in message
        assert "sparse=False" in message


def test_one_device_needs_no_communication_and_no_copy() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    ownership = Ownership.whole(model)
    reducer = GradientReducer(ownership, SharingGroups(ownership, [[0]], lambda ranks: None))
    model(torch.tensor([1])).sum().backward()
    gradient = model.weight.grad
    reducer.start(7.0)
    reducer.ready(model.weight)
    reducer.finish()
    assert model.weight.grad is gradient
    assert not reducer.communicates


def test_groups_are_made_in_one_order_and_once_per_set() -> None:
    made: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    for stage, calls in made.items():
        ownership = Ownership(Model(), _STAGES, pp_rank=stage, pp_size=2)
        groups = SharingGroups(ownership, _STAGE_RANKS, calls.append)  # type: ignore[func-returns-value]
        assert groups.dp_ranks == _STAGE_RANKS[stage]
    assert made[0] == made[1] == [(0, 2), (0, 1, 2, 3), (1, 3)]


def _misuse(rank: int, world_size: int) -> None:
    with gloo_group():
        model = nn.Linear(2, 2)
        ownership = Ownership.whole(model)
        reducer = GradientReducer(ownership, _groups(ownership, [[0, 1]]))
        with pytest.raises(ScheduleError, match="outside a step"):
            reducer.ready(model.weight)
        with pytest.raises(ScheduleError, match="without start"):
            reducer.finish()
        reducer.start(1.0)
        reducer.ready(model.weight)
        with pytest.raises(ScheduleError, match="'weight' was marked final twice"):
            reducer.ready(model.weight)
        with pytest.raises(ScheduleError, match="before the last was finished"):
            reducer.start(1.0)
        reducer.finish()


def test_misuse_is_refused() -> None:
    run_ranks(_misuse, 2, timeout=60)
