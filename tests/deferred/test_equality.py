"""A model built without memory gets, tensor by tensor, what eager construction gives it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_smp.deferred import Part, deferring, is_deferred, realize_module, value_of
from lightning_smp.weights.ownership import Ownership, materialize, release
from tests.deferred.models import HUGGING_FACE, MODELS, assert_same, built_twice


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize("name", [*MODELS, *HUGGING_FACE])
def test_values_generators_and_identities(name: str) -> None:
    make = (MODELS | HUGGING_FACE)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, model = built_twice(make, deferring())
    before = _tensors(model)
    ids = {key: id(tensor) for key, tensor in before.items()}
    assert any(is_deferred(p) for p in model.parameters())
    state = torch.get_rng_state()
    realize_module(model)
    assert torch.equal(state, torch.get_rng_state())
    assert {key: id(tensor) for key, tensor in _tensors(model).items()} == ids
    for key, expected in _tensors(eager).items():
        assert_same(_tensors(model)[key], expected, key)
    assert list(model.state_dict()) == list(eager.state_dict())


@pytest.mark.parametrize("name", ["layers", "tied", "gpt2", "llama"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_stage_of_every_layout(name: str, stages: int) -> None:
    make = (MODELS | HUGGING_FACE)[name]
    for stage in range(stages):
        eager, model = built_twice(make, deferring())
        names = list(dict(model.named_parameters()))
        homes = {key: {place * stages // len(names)} for place, key in enumerate(names)}
        ownership = Ownership(model, homes, pp_rank=stage, pp_size=stages)
        release(model, ownership)
        materialize(model, ownership, torch.device("cpu"))
        expected = dict(eager.named_parameters())
        for key, parameter in model.named_parameters():
            assert not is_deferred(parameter)
            if homes[key] == {stage}:
                assert_same(parameter, expected[key], key)
            else:
                assert parameter.untyped_storage().nbytes() == parameter.element_size()
                assert parameter.requires_grad == expected[key].requires_grad


def test_views_of_one_memory_stay_so_and_attributes_are_made() -> None:
    eager, model = built_twice(MODELS["views"], deferring())
    realize_module(model)
    assert model.low.untyped_storage().data_ptr() == model.high.untyped_storage().data_ptr()
    model.low.data.zero_()
    assert not model.base[:3].any()
    assert_same(model.base[3:], eager.base[3:], "base")
    assert_same(model.tables[1]["scale"], eager.tables[1]["scale"], "scale")


def test_tied_parameters_stay_one_object() -> None:
    _, model = built_twice(MODELS["tied"], deferring())
    realize_module(model)
    assert model["head"].weight is model["tokens"].weight


def test_a_slice_is_taken_before_anything_is_kept() -> None:
    eager, model = built_twice(lambda: nn.Linear(30, 40), deferring())
    taken = value_of(model.weight, part=Part(0, ((10, 20),)))
    assert torch.equal(taken, eager.weight[10:20])
    assert taken.untyped_storage().nbytes() == taken.numel() * 4
    assert is_deferred(model.weight)


def test_default_dtype_and_grad_mode_of_the_construction_hold() -> None:
    def make() -> nn.Module:
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Linear(5, 5)
            model.share = nn.Parameter(torch.ones(3, dtype=torch.long).clone() / 3)
            model.bias.requires_grad_(False)
        finally:
            torch.set_default_dtype(former)
        return model

    eager, model = built_twice(make, deferring())
    realize_module(model)
    for key, expected in _tensors(eager).items():
        assert_same(_tensors(model)[key], expected, key)


def test_building_in_several_contexts_is_like_building_in_one() -> None:
    def parts(first: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(first(), nn.Linear(7, 7))

    def inner() -> nn.Module:
        with deferring():
            return nn.Linear(7, 7)

    eager, model = built_twice(lambda: parts(lambda: nn.Linear(7, 7)), deferring())
    _, mixed = built_twice(lambda: parts(inner), deferring())
    with torch.no_grad():
        mixed[1].weight.copy_(mixed[0].weight)  # between tensors of two contexts
    realize_module(mixed)
    realize_module(model)
    assert torch.equal(mixed[1].weight, eager[0].weight)
    assert torch.equal(model[1].weight, eager[1].weight)
