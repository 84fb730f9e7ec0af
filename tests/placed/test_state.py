"""Attributes that a step writes on outer modules, kept apart for suspended microbatches."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.state import AttributeSwap, AttributeWatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.skip: object = None
        self.count = 0


def test_written_attributes_are_found() -> None:
    model = Model()
    watch = AttributeWatch([("", model), ("inner", model.inner)])
    same = model.skip
    model.skip = same
    model.count += 1
    model.inner.fresh = "new"
    model._hidden = 1
    assert set(watch.written()) == {("", "count"), ("", "_hidden"), ("inner", "fresh")}


def test_attributes_that_are_put_back_are_found_at_a_look() -> None:
    model = Model()
    watch = AttributeWatch([("", model)])
    model.skip = "kept while the step is suspended"
    watch.look()
    model.skip = None
    assert watch.written() == (("", "skip"),)


def test_each_microbatch_finds_what_it_wrote() -> None:
    model = Model()
    swap = AttributeSwap([("", "skip"), ("inner", "fresh")], model)
    for microbatch in (0, 1):
        swap.enter(microbatch)
        model.skip, model.inner.fresh = f"skip{microbatch}", f"fresh{microbatch}"
        swap.leave(microbatch)
    for microbatch in (0, 1):
        swap.enter(microbatch)
        assert (model.skip, model.inner.fresh) == (f"skip{microbatch}", f"fresh{microbatch}")
        swap.leave(microbatch)


def test_counter_goes_on_counting() -> None:
    model = Model()
    swap = AttributeSwap([("", "count")], model)
    for microbatch in range(4):
        swap.enter(microbatch)
        model.count += 1
        swap.leave(microbatch)
    assert model.count == 4


def test_counter_goes_on_where_the_latest_microbatch_left_it() -> None:
    model = Model()
    swap = AttributeSwap([("", "count")], model)
    for microbatch in (0, 1, 0, 2, 1, 2):
        begins = microbatch not in swap._own
        swap.enter(microbatch)
        model.count += begins
        assert model.count == microbatch + 1
        swap.leave(microbatch)
    assert model.count == 3


def test_number_written_around_a_suspension_is_refused() -> None:
    model = Model()
    swap = AttributeSwap([("", "count")], model)
    for microbatch in (0, 1):
        swap.enter(microbatch)
        model.count += 1
        swap.leave(microbatch)
    swap.enter(0)
    model.count += 1
    with pytest.raises(UnsupportedError, match="`count` several times"):
        swap.leave(0)


def test_attribute_that_is_not_there_yet() -> None:
    model = Model()
    swap = AttributeSwap([("inner", "fresh")], model)
    swap.enter(0)
    swap.leave(0)
    assert not hasattr(model.inner, "fresh")


def test_without_a_model_nothing_is_swapped() -> None:
    swap = AttributeSwap(())
    swap.enter(0)
    swap.leave(0)
