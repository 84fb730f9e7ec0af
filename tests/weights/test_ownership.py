import pytest
import torch
from torch import nn

from lightning_smp.errors import PartitionError
from lightning_smp.weights.ownership import (
    Ownership,
    forget_foreign_state,
    materialize,
    placeholder_like,
    release,
)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a block with buffers, an outer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.ones(3))


_STAGES = {
    "embedding.weight": (0,),
    "head.weight": (1,),
    "head.bias": (1,),
    "norm.weight": (0,),
    "norm.bias": (0,),
}
_BUFFERS = {
    "norm.running_mean": (0,),
    "norm.running_var": (0,),
    "norm.num_batches_tracked": (0,),
}


def _own(module: nn.Module, pp_rank: int) -> Ownership:
    return Ownership(
        module,
        _STAGES,
        buffers=_BUFFERS,
        units={"embedding": 0, "norm": 0, "head": 1},
        pp_rank=pp_rank,
        pp_size=2,
    )


def test_whole_module_is_local() -> None:
    module = Tied()
    ownership = Ownership.whole(module)
    assert all(ownership.is_local(p) and ownership.counts_here(p) for p in module.parameters())
    before = module.state_dict()
    release(module, ownership)
    assert all(before[k].data_ptr() == v.data_ptr() for k, v in module.state_dict().items())


def test_names_of_a_shared_parameter_unite() -> None:
    module = Tied()
    ownership = _own(module, 1)
    weight = module.embedding.weight
    assert ownership.stages_of(weight) == (0, 1)
    assert ownership.owner(weight) == 0
    assert ownership.is_local(weight)
    assert not ownership.counts_here(weight)
    assert ownership.name_of(weight) == "embedding.weight"
    assert list(ownership.parameters()) == list(module.parameters())


def test_what_is_not_named_is_everywhere() -> None:
    module = Tied()
    for pp_rank in (0, 1):
        ownership = _own(module, pp_rank)
        assert ownership.stages_of(module.scale) == (0, 1)
        assert ownership.stages_of_name("offset") == (0, 1)
        assert ownership.stages_of_name("nothing") is None


def test_entries_that_are_no_tensors_follow_their_unit() -> None:
    ownership = _own(Tied(), 0)
    assert ownership.stages_of_entry("head._extra_state") == (1,)
    assert ownership.stages_of_entry("head.deep.down._extra_state") == (1,)
    assert ownership.stages_of_entry("_extra_state") == (0, 1)
    assert ownership.stages_of_entry("head.weight") == (0, 1)


def test_release_keeps_identity_and_frees_memory() -> None:
    module = Tied()
    module.head.bias.requires_grad_(False)
    module.norm.weight.grad = torch.ones(4)
    parameters = list(module.parameters())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ownership = _own(module, 1)
    release(module, ownership)
    release(module, ownership)

    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert module.head.weight is module.embedding.weight
    assert not module.head.bias.requires_grad
    assert module.norm.weight.grad is None
    for name, value in module.state_dict().items():
        assert value.shape == before[name].shape
        assert value.dtype == before[name].dtype
        if name in _BUFFERS or name in ("norm.weight", "norm.bias"):
            assert value.untyped_storage().nbytes() == value.element_size()
        else:
            assert torch.equal(value, before[name])
    assert module.norm.weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        module.norm.weight.data.add_(1)


def test_release_of_a_module_on_the_meta_device() -> None:
    module = nn.Module()
    module.near = nn.Parameter(torch.empty(3, device="meta"))
    module.far = far = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    far.mark = "kept"
    ownership = Ownership(module, {"near": (0,), "far": (1,)}, pp_rank=0, pp_size=2)
    release(module, ownership, torch.device("cpu"))
    assert module.far is far
    assert far.device.type == "cpu"
    assert far.mark == "kept"
    assert not far.requires_grad
    assert far in ownership
    assert module.near.is_meta
    with pytest.raises(PartitionError, match=r"'near'.*meta"):
        materialize(module, ownership, torch.device("cpu"))


def test_materialize_gives_placeholders_no_memory() -> None:
    module = Tied()
    ownership = _own(module, 0)
    release(module, ownership)
    module.double()  # gives placeholders memory
    assert module.head.bias.untyped_storage().nbytes() > 8
    materialize(module, ownership, torch.device("cpu"))
    assert module.head.bias.untyped_storage().nbytes() == 8
    assert module.head.bias.dtype is torch.float64
    assert not module.norm.running_mean.isnan().any()


def test_shared_buffers_stay_shared() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1]._buffers["running_mean"] = module[0].running_mean
    ownership = Ownership(module, {}, buffers={"0.running_mean": (1,)}, pp_rank=0, pp_size=2)
    assert ownership.stages_of_name("1.running_mean") == (1,)
    release(module, ownership)
    assert module[0].running_mean is module[1].running_mean
    assert module[0].running_mean.isnan().all()


def test_optimizers_forget_foreign_state() -> None:
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ownership = _own(module, 1)
    release(module, ownership)
    forget_foreign_state(optimizer, ownership)
    assert set(optimizer.state) == {p for p in module.parameters() if ownership.is_local(p)}
    assert optimizer.param_groups[0]["params"] == list(module.parameters())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64, torch.float16]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 2)])
def test_placeholders_of_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    placeholder = placeholder_like(torch.zeros(shape, dtype=dtype))
    assert placeholder.shape == shape
    assert placeholder.dtype is dtype
    assert placeholder.untyped_storage().nbytes() == placeholder.element_size()


def test_wrong_names_and_stages_are_refused() -> None:
    module = Tied()
    with pytest.raises(PartitionError, match=r"'embeding\.weight'.*'embedding\.weight'\?"):
        Ownership(module, {"embeding.weight": (0,)}, pp_rank=0, pp_size=2)
    with pytest.raises(PartitionError, match="from 0 to 1"):
        Ownership(module, {"scale": (2,)}, pp_rank=0, pp_size=2)
    with pytest.raises(PartitionError, match="at least one"):
        Ownership(module, {"scale": ()}, pp_rank=0, pp_size=2)
    with pytest.raises(PartitionError, match="does not hold it"):
        _own(module, 0).stages_of(nn.Parameter(torch.zeros(2)))
