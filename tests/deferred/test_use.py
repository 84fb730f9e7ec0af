"""What may be done with deferred tensors before they have values, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smp.deferred import Part, deferring, is_deferred, realize, realize_module
from lightning_smp.errors import UnsupportedError


def _linear() -> nn.Linear:
    torch.manual_seed(3)
    with deferring():
        return nn.Linear(6, 5)


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("addmm", lambda m: m(torch.ones(1, 6))),
        ("saving", lambda m: copy.copy(m.weight)),
        ("data_ptr", lambda m: m.weight.data_ptr()),
        ("untyped_storage", lambda m: m.weight.untyped_storage()),
        ("storage", lambda m: m.weight.storage()),
        ("share_memory_", lambda m: m.share_memory()),
        ("resize_", lambda m: m.weight.detach().resize_(40)),
    ],
)
def test_what_needs_memory_is_refused_by_name(what: str, use: Callable[[Any], Any]) -> None:
    model = _linear()
    with pytest.raises(UnsupportedError, match=rf"(?s){what}.*of Linear' \(made at .*test_use.py"):
        use(model)


def test_a_view_that_was_left_over_is_refused() -> None:
    with deferring():
        model = nn.Linear(6, 5)
        view = model.weight.data[0]
    realize_module(model)
    with pytest.raises(UnsupportedError, match="view of deferred parameter 'weight of Linear'"):
        view.fill_(1)


def test_a_large_operand_that_changed_is_refused() -> None:
    operand = torch.ones(200, 200)
    with deferring():
        model = nn.Linear(200, 200)
        model.weight.data.copy_(operand)
    operand.add_(1)
    with pytest.raises(UnsupportedError, match=r"\[200, 200\].*modified afterwards"):
        realize_module(model)


def test_a_small_operand_may_change() -> None:
    operand = torch.ones(5)
    with deferring():
        model = nn.Linear(6, 5)
        model.bias.data.copy_(operand)
    operand.add_(1)
    realize_module(model)
    assert torch.equal(model.bias.detach(), torch.ones(5))


def test_numbers_that_python_asks_for_are_true_and_not_kept() -> None:
    torch.manual_seed(3)
    eager = nn.Linear(6, 5)
    model = _linear()
    assert model.bias.tolist() == eager.bias.tolist()
    with torch.no_grad():
        assert model.weight.sum().item() == eager.weight.sum().item()
        assert torch.equal(model.weight.max(), model.weight.max())
    array = model.weight.detach().numpy()
    assert (array == eager.weight.detach().numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert is_deferred(model.weight)


def test_reading_into_a_real_tensor() -> None:
    torch.manual_seed(3)
    eager = nn.Linear(6, 5)
    target = torch.zeros(5, 6)
    model = _linear()
    with torch.no_grad():
        target.copy_(model.weight)
    assert type(target) is torch.Tensor
    assert torch.equal(target, eager.weight)
    with torch.no_grad():
        assert type(model(torch.ones(1, 6))) is torch.Tensor


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loads_before_there_is_memory(assign: bool) -> None:
    model = _linear()
    state = {key: torch.full(value.shape, 2.0) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    realize_module(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_optimizers_hooks_and_attributes_survive() -> None:
    model = _linear()
    fired = []
    model.weight.register_hook(lambda gradient: fired.append("hook"))
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: fired.append("late"))
    model.weight.no_decay = True
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    realize_module(model)
    assert model.weight.no_decay
    assert not model.bias.requires_grad
    before = model.weight.detach().clone()
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert fired == ["hook", "late"]
    assert torch.equal(model.weight.detach(), before - 0.1)
    handle.remove()
    model(torch.ones(1, 6)).sum().backward()
    assert fired == ["hook", "late", "hook"]


def test_a_copy_is_independent() -> None:
    model = _linear()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
    model.bfloat16()
    realize_module(copied)
    realize_module(model)
    torch.manual_seed(3)
    assert torch.equal(copied.weight, nn.Linear(6, 5).weight)
    assert model.weight.dtype is torch.bfloat16
    assert not model.weight.any()


def test_a_slice_can_take_the_place_of_the_parameter() -> None:
    model = _linear()
    weight = model.weight
    realize([weight], part=Part(0, ((0, 2),)))
    torch.manual_seed(3)
    assert model.weight is weight
    assert torch.equal(weight, nn.Linear(6, 5).weight[:2])


def test_a_part_that_took_the_place_before_there_was_memory_keeps_the_part_only() -> None:
    model = _linear()
    model.weight.data = model.weight.data[2:4]
    realize([model.weight])
    torch.manual_seed(3)
    assert torch.equal(model.weight, nn.Linear(6, 5).weight[2:4])
    assert model.weight.untyped_storage().nbytes() == 2 * 6 * 4


def test_nothing_is_deferred_after_the_context_or_where_it_failed() -> None:
    with pytest.raises(RuntimeError, match="stop"), deferring():
        raise RuntimeError("stop")
    assert not is_deferred(nn.Linear(2, 2).weight)
    with deferring():
        assert not is_deferred(torch.empty(0))
        assert torch.empty(3, device="meta").is_meta
        assert not is_deferred(torch.arange(3))


def test_a_parameter_in_a_graph_is_refused() -> None:
    with deferring():
        model = nn.Linear(6, 5)
        kept = model.weight * 2
    with pytest.raises(UnsupportedError, match="autograd graph"):
        realize([model.weight])
    del kept
