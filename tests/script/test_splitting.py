"""Cutting a step's arguments, and making one value of what the microbatches returned."""

from __future__ import annotations

import argparse
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import lightning_smp as smp
from lightning_smp.script.splitting import Splitter
from lightning_smp.script.step_output import StepOutput, change_tensors, join_results

Pair = namedtuple("Pair", ["left", "right"])


class Graphs:
    """Cuts itself."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Graphs:
        assert axis in (0, 1)
        return Graphs(self.sizes[mb::num_mb])


def test_tensors_are_cut_wherever_they_are() -> None:
    def function(x: Any, *rest: Any, key: Any, **options: Any) -> None: ...

    x = torch.arange(8).view(4, 2)
    calls = Splitter(function, [], {}).split(
        (x, [x, (x,)], {x}),
        {"key": OrderedDict(a=x), "pair": Pair(x, 1), "text": BatchEncoding({"ids": x})},
        2,
    )
    assert len(calls) == 2
    for m, call in enumerate(calls):
        piece = x[2 * m : 2 * m + 2]
        assert call.args[0].data_ptr() == piece.data_ptr()  # a view
        assert torch.equal(call.args[1][0], piece)
        assert torch.equal(call.args[1][1][0], piece)
        assert type(call.args[1][1]) is tuple
        assert [t.tolist() for t in call.args[2]] == [piece.tolist()]
        assert type(call.kwargs["key"]) is OrderedDict
        assert torch.equal(call.kwargs["key"]["a"], piece)
        assert type(call.kwargs["pair"]) is Pair
        assert torch.equal(call.kwargs["pair"].left, piece)
        assert type(call.kwargs["text"]) is BatchEncoding
        assert torch.equal(call.kwargs["text"]["ids"], piece)


def test_everything_else_is_passed_through() -> None:
    def function(*args: Any) -> None: ...

    net = nn.Linear(2, 2)
    same = [
        net, torch.optim.SGD(net.parameters(), lr=1.0), argparse.Namespace(x=torch.ones(3)), 3,
        "text", None, ["a", "b"], [1, 2, 3], {"n": 1}, torch.tensor(1.0),
    ]  # fmt: skip
    for call in Splitter(function, [], {}).split(tuple(same), {}, 2):
        assert all(one is other for one, other in zip(call.args, same, strict=True))


def test_named_arguments_have_axes_or_stay_whole() -> None:
    def function(x: Any, y: Any, mask: Any = None, **more: Any) -> None: ...

    splitter = Splitter(function, ["mask", "table"], {"y": 1, "graphs": 1})
    x, y, mask = torch.ones(4, 2), torch.arange(6).view(1, 6), torch.ones(5)
    table, graphs = torch.ones(7), Graphs([1, 2, 3, 4])
    calls = splitter.split((x, y), {"mask": mask, "table": table, "graphs": graphs}, 2)
    assert [call.args[1].tolist() for call in calls] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert all(call.args[2] is mask for call in calls)
    assert all(call.kwargs["table"] is table for call in calls)
    assert [call.kwargs["graphs"].sizes for call in calls] == [[1, 3], [2, 4]]
    (whole,) = splitter.split((x, y), {}, 1)
    assert whole.args[0] is x


@pytest.mark.parametrize(("size", "valid"), [(6, "4 and 8"), (3, "sizes: 4"), (0, "sizes: 4")])
def test_indivisible_batches_are_refused_with_the_nearest_sizes(size: int, valid: str) -> None:
    def train(data: Any) -> None: ...

    with pytest.raises(smp.ConfigError, match=r"train: data\['x'\] of shape") as raised:
        Splitter(train, [], {}).split(({"x": torch.ones(size, 2)},), {}, 4)
    assert valid in str(raised.value)
    assert "drop_last=True" in str(raised.value)


def test_mistaken_options_are_refused() -> None:
    def train(x: Any) -> None: ...

    with pytest.raises(smp.ConfigError, match=r"non_split_inputs.*'y'.*does not take.*'x'"):
        smp.step(train, non_split_inputs=["y"])
    with pytest.raises(smp.ConfigError, match="input_split_axes"):
        smp.step(train, input_split_axes={"y": 1})
    with pytest.raises(smp.ConfigError, match="an axis is an int"):
        smp.step(train, input_split_axes={"x": "1"})
    with pytest.raises(smp.ConfigError, match="axis 2, but its shape"):
        Splitter(train, [], {"x": 2}).split((torch.ones(4, 2),), {}, 2)
    with pytest.raises(smp.ConfigError, match="as its function"):
        smp.step(["x"])
    with pytest.raises(TypeError, match="missing a required argument"):
        Splitter(train, [], {}).split((), {}, 2)


def test_results_keep_their_structure() -> None:
    def result(m: int) -> Any:
        t = torch.full((2,), float(m))
        output = CausalLMOutput(loss=t, logits=t)
        return {"out": output, "list": [t, (t, m)], "pair": Pair(t, "x"), "none": None}

    joined = join_results([result(0), result(1)])
    assert type(joined["out"]) is CausalLMOutput
    assert joined["out"].loss.outputs[1].tolist() == [1, 1]
    assert isinstance(joined["list"][0], StepOutput)
    assert type(joined["list"][1]) is tuple
    assert joined["list"][1][1] == [0, 1]  # numbers: a list with one entry per microbatch
    assert type(joined["pair"]) is Pair
    assert joined["pair"].right == ["x", "x"]
    assert joined["none"] is None
    ragged = join_results([[torch.ones(1)], []])
    assert type(ragged) is list
    assert ragged[1] == []


def test_sets_are_returned_whole_and_without_tensors() -> None:
    assert join_results([{"kinds": {1, 2}}, {"kinds": {3}}]) == {"kinds": [{1, 2}, {3}]}
    assert change_tensors([frozenset("ab")], torch.neg) == [frozenset("ab")]
    for returned in ({torch.ones(1)}, frozenset([("a", torch.ones(1))])):
        for call in (lambda r: join_results([r, r]), lambda r: change_tensors([r], torch.neg)):
            with pytest.raises(smp.UnsupportedError, match=r"no order.*Return a list"):
                call(returned)


def test_step_output() -> None:
    output = StepOutput([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    assert output.reduce_mean().tolist() == [2, 4]
    assert output.reduce_sum().tolist() == [4, 8]
    assert output.concat().tolist() == [1, 2, 3, 6]
    assert output.stack().tolist() == [[1, 2], [3, 6]]
    assert len(output.outputs) == 2
    with pytest.raises(smp.UnsupportedError, match=r"Use stack\(\)"):
        StepOutput([torch.tensor(1.0)]).concat()


def test_a_step_is_no_method_and_keeps_its_name() -> None:
    class Trainer:
        @smp.step
        def bare(x: Tensor) -> None:  # noqa: N805
            """Text."""

        @smp.step()
        def called(x: Tensor) -> None: ...  # noqa: N805

    assert Trainer().bare is Trainer.bare  # no self is bound
    assert Trainer.bare.__name__ == "bare"
    assert Trainer.bare.__doc__ == "Text."
    with pytest.raises(smp.SMPError, match="there is no distributed model"):
        Trainer().called(torch.ones(2))
