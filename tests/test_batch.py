import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_smp.batch import batch_digest, batch_size, merge_outputs, split_batch
from lightning_smp.batch_merge import weighted_mean
from lightning_smp.errors import ConfigError, UnsupportedError

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list
    scale: float = 1.0


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class MirrorDict(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value


class OwnMapping(Mapping):
    def __init__(self, data):
        self._data = dict(data)

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Graphs:
    """Splits itself, as SMP's protocol has it."""

    def __init__(self, x):
        self.x = x

    def smp_slice(self, num_mb, mb, axis):
        assert axis == 0
        return Graphs(self.x.chunk(num_mb, axis)[mb])


def rows(n, width=3, start=0.0):
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width) + start


def split(batch, microbatches, allow_uneven=True, axes=None):
    return split_batch(batch, microbatches, allow_uneven=allow_uneven, axes=axes)


def values(batch, microbatches, **kwargs):
    return [piece.value for piece in split(batch, microbatches, **kwargs)]


def test_tensors_are_views():
    x = rows(8)
    pieces = split(x, 4, allow_uneven=False)
    assert [(p.start, p.num_samples) for p in pieces] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert torch.equal(torch.cat([p.value for p in pieces]), x)
    assert all(p.value.untyped_storage().data_ptr() == x.data_ptr() for p in pieces)


def test_one_microbatch_returns_the_batch_itself():
    for batch in (
        {"x": rows(3), "y": rows(2)},
        object(),
        "text",
        pack_sequence([rows(2), rows(1)]),
    ):
        (piece,) = split(batch, 1)
        assert piece.value is batch
    assert split(rows(3), 1)[0].num_samples == 3
    assert split({"x": rows(3), "y": rows(2)}, 1)[0].num_samples == 1


def test_nested_containers_keep_their_types():
    batch = {
        "list": [rows(4), (rows(4), {"deep": rows(4, 1)})],
        "pair": Pair(rows(4), torch.tensor(2.5)),
        "sample": Sample(rows(4), ["a", "b", "c", "d"]),
        "ordered": OrderedDict(x=rows(4)),
        "default": defaultdict(list, x=rows(4)),
        "proxy": MappingProxyType({"x": rows(4)}),
        "user": UserDict(x=rows(4)),
        "own": OwnMapping({"x": rows(4)}),
        "set": {rows(4)},
        "size": torch.Size([4, 4]),
        "flag": True,
        "none": None,
    }
    first, second = values(batch, 2)
    assert first["size"] == (4, 4)
    assert type(first["size"]) is torch.Size
    for name in ("pair", "sample", "ordered", "default", "proxy", "user", "own", "set", "list"):
        assert type(first[name]) is type(batch[name]), name
    assert torch.equal(second["list"][1][1]["deep"], rows(4, 1)[2:])
    assert first["pair"].y is batch["pair"].y
    assert second["sample"].names == ["c", "d"]
    assert second["sample"].scale == 1.0
    assert first["default"].default_factory is list
    for name in ("ordered", "default", "proxy", "user", "own"):
        assert torch.equal(second[name]["x"], rows(4)[2:]), name
        assert torch.equal(batch[name]["x"], rows(4)), "the batch itself is not changed"
    assert next(iter(first["set"])).shape == (2, 3)
    assert first["flag"] is True
    assert first["none"] is None


def test_hugging_face_containers():
    batch = BatchEncoding({"input_ids": rows(4), "attention_mask": rows(4)})
    pieces = values(batch, 2)
    assert type(pieces[1]) is BatchEncoding
    assert torch.equal(pieces[1].input_ids, rows(4)[2:])
    assert torch.equal(batch["input_ids"], rows(4))
    output = SequenceClassifierOutput(loss=torch.tensor(1.0), logits=rows(4))
    piece = values(output, 2)[1]
    assert type(piece) is SequenceClassifierOutput
    assert torch.equal(piece.logits, rows(4)[2:])
    assert torch.equal(piece["logits"], rows(4)[2:])
    assert piece.hidden_states is None


@pytest.mark.parametrize("cls", [AttrDict, MirrorDict])
def test_attributes_that_mirror_items_are_split_too(cls):
    batch = cls()
    batch["x"] = rows(4)
    piece = values(batch, 2)[1]
    assert type(piece) is cls
    assert torch.equal(piece["x"], rows(4)[2:])
    assert torch.equal(piece.x, rows(4)[2:])
    assert torch.equal(batch.x, rows(4))


def test_own_attributes_of_containers_are_split():
    class Batch(dict):
        pass

    batch = Batch(x=rows(4))
    batch.mask = rows(4, 1)
    piece = values(batch, 2)[1]
    assert torch.equal(piece.mask, rows(4, 1)[2:])
    assert batch.mask.shape == (4, 1)


def test_frozen_slots_dataclass():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots:
        x: torch.Tensor

    assert torch.equal(values(Slots(rows(4)), 2)[1].x, rows(4)[2:])


def test_containers_without_tensors_keep_their_identity():
    config = {"heads": 4, "names": ("a", "b", "c")}
    pieces = values({"x": rows(4), "config": config}, 2)
    assert pieces[0]["config"] is config
    assert pieces[1]["config"] is config


def test_lists_of_samples_are_sliced():
    batch = {"x": rows(4), "names": ["a", "b", "c", "d"], "ids": (1, 2, 3, 4), "other": ["a", "b"]}
    second = values(batch, 2)[1]
    assert second["names"] == ["c", "d"]
    assert second["ids"] == (3, 4)
    assert second["other"] == ["a", "b"]


def test_lists_of_lists_are_sliced_at_the_level_of_the_samples():
    batch = {"x": rows(2), "references": [["a", "b"], ["c"]]}
    assert values(batch, 2)[1]["references"] == [["c"]]
    with pytest.raises(ConfigError, match="two levels"):
        values({"x": rows(2), "references": [["a", "b"], ["c", "d"]]}, 2)


def test_batch_of_strings_only():
    assert values({"text": ["a", "b", "c"], "label": (0, 1, 2)}, 3)[2] == {
        "text": ["c"],
        "label": (2,),
    }
    assert batch_size(["a", "b", "c"]) == 3
    assert values([("a", "b", "c"), ("x", "y", "z")], 3)[1] == [("b",), ("y",)]


def test_list_of_objects_is_sliced():
    graphs = [SimpleNamespace(x=rows(2)) for _ in range(4)]
    assert values(graphs, 2)[1] == graphs[2:]
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        values([rows(4), graphs[:3]], 2)


def test_numpy_arrays():
    array = np.arange(8).reshape(4, 2)
    pieces = values({"x": array, "scalar": np.array(3.0)}, 2)
    assert np.array_equal(pieces[1]["x"], array[2:])
    assert np.shares_memory(pieces[1]["x"], array)
    assert pieces[1]["scalar"] == 3.0


def test_smp_slice():
    pieces = values({"g": Graphs(rows(4)), "y": rows(4)}, 2)
    assert torch.equal(pieces[1]["g"].x, rows(4)[2:])
    only = split(Graphs(rows(4)), 2)
    assert [(p.num_samples, p.start) for p in only] == [(1, 0), (1, 1)]


def test_axes():
    batch = {"x": rows(2, 4), "y": rows(4), "mask": rows(1, 1)}
    second = values(batch, 2, axes={"x": 1, "mask": None})[1]
    assert torch.equal(second["x"], rows(2, 4)[:, 2:])
    assert second["mask"] is batch["mask"]
    assert torch.equal(values(batch, 2, axes={"x": -1, "mask": None})[1]["x"], second["x"])
    with pytest.raises(ConfigError, match="'z', which the batch does not have"):
        values(batch, 2, axes={"z": 1})
    with pytest.raises(ConfigError, match="batch\\['x'\\] was to be split along axis 2"):
        values(batch, 2, axes={"x": 2})
    tuple_batch = (rows(2, 4), rows(4))
    assert torch.equal(values(tuple_batch, 2, axes={0: 1})[1][0], rows(2, 4)[:, 2:])


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": rows(4), "mask": rows(1)}, r"batch\['mask'\] has size 1"),
        ((rows(4), [rows(3)]), r"batch\[1\]\[0\] has size 3"),
        (Sample(rows(4), [rows(2)]), r"batch\.names\[0\] has size 2"),
    ],
)
def test_other_sizes_are_refused_with_path_and_fix(batch, path):
    with pytest.raises(ConfigError, match=path) as caught:
        split(batch, 2)
    assert "size 4" in str(caught.value)
    assert "microbatches=1" in str(caught.value)
    assert batch_size(batch) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.eye(4).to_sparse(), "sparse"),
        (torch.eye(4).to_sparse_csr(), "sparse"),
        (torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged), "nested"),
        (pack_sequence([rows(2), rows(1)]), "PackedSequence"),
        (SimpleNamespace(x=rows(4)), "SimpleNamespace"),
        (SimpleNamespace(inner=SimpleNamespace(x=[rows(4)])), "SimpleNamespace"),
    ],
)
def test_values_that_cannot_be_split_are_refused_by_name(value, name):
    for batch in ({"x": rows(4), "v": value}, value, (value, 1.0)):
        with pytest.raises(UnsupportedError, match=name) as caught:
            split(batch, 2)
        assert "microbatches=1" in str(caught.value)
    batch_size(value)


def test_models_and_optimizers_pass_through():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    args = (model, optimizer, scheduler, torch.amp.GradScaler("cpu"), SimpleNamespace(a=1), rows(4))
    for piece in values(args, 2):
        assert all(a is b for a, b in zip(piece[:-1], args[:-1], strict=True))


def test_batches_without_size():
    with pytest.raises(ConfigError, match="no tensor with a batch dimension"):
        split({"a": 1, "b": torch.tensor(1.0)}, 2)
    with pytest.raises(ConfigError, match="empty batch"):
        split(rows(0), 2)
    with pytest.raises(ConfigError, match="at least 1"):
        split(rows(2), 0)
    assert batch_size(None) is None


def test_indivisible():
    with pytest.raises(ConfigError, match=r"10 samples .* 8 and 12.*drop_last=True"):
        split(rows(10), 4, allow_uneven=False)
    with pytest.raises(ConfigError, match=r"sizes: 4\."):
        split(rows(3), 4, allow_uneven=False)
    assert [p.num_samples for p in split(rows(10), 4)] == [3, 3, 2, 2]


def test_small_batch_gives_fewer_microbatches():
    assert [p.num_samples for p in split(rows(3), 4)] == [1, 1, 1]
    batch = {"x": rows(1)}
    (piece,) = split(batch, 4)
    assert piece.value is batch


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), microbatches=st.integers(1, 12))
def test_split_covers_the_batch_and_merge_undoes_it(size, microbatches):
    batch = {"x": rows(size), "names": [str(i) for i in range(size)], "t": (rows(size, 2), "same")}
    pieces = split(batch, microbatches)
    sizes = [p.num_samples for p in pieces]
    assert len(pieces) == min(size, microbatches)
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [p.start for p in pieces] == [sum(sizes[:i]) for i in range(len(sizes))]
    merged = merge_outputs([p.value for p in pieces], sizes)
    assert torch.equal(merged["x"], batch["x"])
    assert merged["names"] == batch["names"]
    assert torch.equal(merged["t"][0], batch["t"][0])
    assert merged["t"][1] == "same"


class TestMerge:
    sizes = (3, 2)

    def merge(self, *outputs):
        return merge_outputs(list(outputs), list(self.sizes))

    def test_one_output_is_untouched(self):
        output = {"x": [1]}
        assert merge_outputs([output], [3]) is output

    def test_scalars(self):
        mean = self.merge(torch.tensor(1.0), torch.tensor(2.0))
        assert mean.item() == pytest.approx(1.4)
        assert self.merge(1.0, 2.0) == pytest.approx(1.4)
        assert self.merge(0, 0.5) == pytest.approx(0.2)
        assert self.merge(0.1, 0.1) == 0.1
        assert self.merge(torch.tensor(4), torch.tensor(4)).item() == 8

    def test_scalars_keep_dtype_and_exactness(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            value = torch.tensor(0.1, dtype=dtype)
            merged = self.merge(value, value.clone())
            assert merged.dtype is dtype
            assert merged == value
        assert torch.isinf(self.merge(torch.tensor(float("inf")), torch.tensor(1.0)))

    def test_ints(self):
        assert self.merge(3, 2) == 5
        assert self.merge(7, 7) == 7
        assert self.merge(7, 8) == [7, 8]
        assert self.merge(True, True) is True
        assert self.merge(True, False) == [True, False]

    def test_rows(self):
        assert torch.equal(self.merge(rows(3), rows(2)), torch.cat([rows(3), rows(2)]))
        ragged = self.merge(rows(3, 4), rows(2, 3))
        assert isinstance(ragged, list)
        other = self.merge(rows(4), rows(4))
        assert isinstance(other, list)
        merged = self.merge(np.zeros((3, 1)), np.ones((2, 1)))
        assert merged.shape == (5, 1)

    def test_lists(self):
        assert self.merge(["a", "b", "c"], ["d", "e"]) == ["a", "b", "c", "d", "e"]
        ragged = self.merge([rows(1), rows(7), rows(9)], [rows(4), rows(8)])
        assert [len(x) for x in ragged] == [1, 7, 9, 4, 8]
        fields = self.merge((rows(3), torch.tensor(1.0)), (rows(2), torch.tensor(1.0)))
        assert fields[0].shape == (5, 3)
        assert fields[1] == 1.0

    def test_list_as_long_as_even_microbatches(self):
        one, other = [{"boxes": rows(1)}, {"boxes": rows(2)}], [{"boxes": rows(2)}] * 2
        assert len(merge_outputs([one, other], [2, 2])) == 4
        assert merge_outputs([(rows(2), "a"), (rows(2), "a")], [2, 2])[0].shape == (4, 3)

    def test_containers(self):
        merged = self.merge(
            SequenceClassifierOutput(loss=torch.tensor(1.0), logits=rows(3)),
            SequenceClassifierOutput(loss=torch.tensor(2.0), logits=rows(2)),
        )
        assert type(merged) is SequenceClassifierOutput
        assert merged.logits.shape == (5, 3)
        assert merged.loss.item() == pytest.approx(1.4)
        assert self.merge({"a": 1.0}, {"b": 1.0}) == [{"a": 1.0}, {"b": 1.0}]
        assert self.merge(Pair("a", None), Pair("a", None)) == Pair("a", None)

    def test_objects(self):
        cache = object()
        assert self.merge(cache, cache) is cache
        two = [object(), object()]
        assert self.merge(*two) == two
        assert self.merge(None, None) is None
        assert self.merge({1}, {1}) == {1}
        buffer = rows(3)
        assert self.merge(buffer, buffer) is buffer


class TestDigest:
    def test_equal_batches(self):
        batch = {"x": rows(4), "t": (np.arange(3), "a", 1, None, {rows(2), rows(3)}, b"z")}
        assert batch_digest(batch) == batch_digest(copy.deepcopy(batch))
        assert len(batch_digest(batch)) == 16
        assert batch_digest(rows(4).t()) == batch_digest(rows(4).t().contiguous())

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (rows(4), rows(4, start=1)),
            (rows(4), rows(4).double()),
            (rows(4), rows(4).reshape(3, 4)),
            (rows(4), rows(4).flip(0)),
            ([rows(4)], (rows(4),)),
            ({"a": rows(2)}, {"b": rows(2)}),
            ([rows(2), rows(3)], [rows(3), rows(2)]),
            ("a", "b"),
            (1, 1.0),
            (1, True),
            (["ab", "c"], ["a", "bc"]),
            (np.zeros(3), np.ones(3)),
            (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
            (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
            (SimpleNamespace(x=rows(2)), SimpleNamespace(x=rows(2, start=1))),
            (torch.tensor(1.0), torch.tensor(2.0)),
            (torch.tensor([True]), torch.tensor([False])),
            (torch.tensor([1j]), torch.tensor([1j]).conj()),
        ],
    )
    def test_different_batches(self, one, other):
        assert batch_digest(one) != batch_digest(other)

    def test_large_tensors(self):
        torch.manual_seed(0)
        x = torch.randn(64, 8191)
        digest = batch_digest(x)
        assert digest == batch_digest(x.clone())
        for index in torch.randint(x.numel(), (50,)).tolist():
            changed = x.clone()
            changed.view(-1)[index] += 0.5
            assert batch_digest(changed) != digest, index
        assert batch_digest(x[torch.randperm(64)]) != digest
        assert batch_digest(x.flatten()[1:]) == batch_digest(x.flatten()[1:].clone())

    def test_layouts_and_odd_tensors(self):
        batch = [
            torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged),
            torch.eye(3).to_sparse_csr(),
            torch.eye(3).to_sparse_csc(),
            torch.empty(0, 3),
            torch.empty(2, device="meta"),
            pack_sequence([rows(2), rows(1)]),
            torch.quantize_per_tensor(rows(2), 0.1, 0, torch.qint8),
        ]
        assert batch_digest(batch) == batch_digest(batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [
        ([1.0, 2.0, 4.0], [1.0, 1.0, 2.0], 2.75),
        ([0.1, 0.1, 0.1], [3.0, 5.0, 7.0], 0.1),
        ([1.0, 3.0], [0.0, 0.0], 2.0),
        ([float("inf"), 1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_weighted_mean_of_numbers_and_of_vectors_agree(dtype, values, weights, mean):
    numbers = [torch.tensor(value, dtype=dtype) for value in values]
    one = weighted_mean(numbers, weights)
    assert one.dtype is dtype
    torch.testing.assert_close(one, torch.tensor(mean, dtype=dtype))
    several = weighted_mean([number.expand(2) for number in numbers], weights)
    torch.testing.assert_close(several, one.expand(2))


def test_weighted_mean_keeps_the_graph():
    values = [torch.tensor(value, requires_grad=True) for value in (1.0, 5.0)]
    weighted_mean(values, [1.0, 3.0]).backward()
    assert [value.grad.item() for value in values] == [0.25, 0.75]
