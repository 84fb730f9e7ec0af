"""Results as data: taken apart, sent, built again; tensors mapped and listed in one order."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.structure import build, iter_tensors, map_tensors, take_apart

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    value: Any
    other: Any = 3


@dataclass(frozen=True)
class Frozen:
    value: Any


class Output(OrderedDict[str, Any]):
    """A dict of its own class."""


class Opaque:
    """Neither data nor a tensor."""


def _apart(result: Any, operands: dict[int, int] | None = None) -> tuple[Any, list[torch.Tensor]]:
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    return take_apart(result, leaf, operands or {}, "unit 'a'"), leaves


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(1.5)
tensors = st.integers(0, 3).map(torch.arange)
structures = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner, inner)
        | st.builds(Frozen, inner)
    ),
    max_leaves=8,
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (Record, Frozen)):
        return _same(vars(one), vars(other))
    return bool(one == other)


@given(structures)
def test_built_as_it_was_taken_apart(result: Any) -> None:
    template, leaves = _apart(result)
    assert _same(build(template, leaves, []), result)
    assert all(one is other for one, other in zip(leaves, iter_tensors(result), strict=True))


@given(structures)
def test_mapping_meets_tensors_in_order(result: Any) -> None:
    met: list[torch.Tensor] = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        met.append(tensor)
        return tensor

    assert _same(map_tensors(result, change), result)
    assert all(one is other for one, other in zip(met, iter_tensors(result), strict=True))


def test_template_is_plain_data() -> None:
    template, _ = _apart({"a": [torch.ones(1), Pair(1, None)], "b": torch.Size([2])})
    assert template == [
        "d",
        [
            ["a", ["l", [["t", 0], ["n", [__name__, "Pair"], [["c", 1], ["c", None]]]]]],
            ["b", ["S", [2]]],
        ],
    ]


@pytest.mark.parametrize(
    "result",
    [
        torch.topk(torch.arange(4.0), 2),
        Output(logits=torch.ones(1), loss=None),
        slice(torch.ones(1), None, 2),
        torch.Size([2, 3]),
    ],
    ids=["return type", "dict of its own class", "slice", "size"],
)
def test_other_kinds_are_kept(result: Any) -> None:
    if isinstance(result, slice):
        mapped = map_tensors(result, lambda tensor: tensor)
        assert mapped.start is result.start
        return
    template, leaves = _apart(result)
    again = build(template, leaves, [])
    assert type(again) is type(result)
    assert list(again) == list(result)


def test_model_output_of_hugging_face() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    result = outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    template, leaves = _apart(result)
    again = build(template, leaves, [])
    assert type(again) is type(result)
    assert again.last_hidden_state is leaves[0]
    doubled = map_tensors(result, lambda tensor: tensor * 2)
    assert type(doubled) is type(result)
    assert doubled["last_hidden_state"].tolist() == [2, 2]


def test_operand_that_comes_back() -> None:
    cache = Opaque()
    template, _ = _apart((torch.ones(1), cache), {id(cache): 2})
    assert template[1][1] == ["o", 2]
    other = Opaque()
    assert build(template, ["leaf"], [None, None, other]) == ("leaf", other)


def test_what_cannot_be_rebuilt_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"unit 'a' returned a .*Opaque"):
        _apart([Opaque()])


def test_class_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no_such_module\.Thing"):
        build(["n", ["no_such_module", "Thing"], []], [], [])
    with pytest.raises(UnsupportedError, match="module level"):
        build(["D", ["os", "path"], []], [], [])


def test_dataclass_without_tensors_stays_the_same_object() -> None:
    record = Record(1)
    assert map_tensors([record], lambda tensor: tensor)[0] is record
