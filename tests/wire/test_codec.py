"""Encoding and decoding of objects: round trips, refusals, and bytes that nobody should send."""

from __future__ import annotations

import contextlib
import enum
import struct
from collections import OrderedDict, namedtuple
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_smp.errors import CommunicationError
from lightning_smp.wire import dumps, loads
from lightning_smp.wire.layout import DTYPE_OF_CODE, HEADER, MAX_DEPTH, SIZE, Tag

Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Zone(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(0)


class TaggedTensor(torch.Tensor):
    pass


def _zeros(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**400,
    -(10**400),
    0.0,
    float("inf"),
    1 + 2j,
    "",
    "a\0b",
    "\u00e9\u4e2d\ud800",
    "x" * 255,
    "x" * 256,
    b"",
    b"\x00\xff",
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, [2, (3,)]],
    {"b": 1, "a": 2, 3: None, (1, "k"): [0.5], None: True},
    {1, "a", (2, 3)},
    frozenset({b"x"}),
    slice(None, 3, -1),
    slice("a", (1,), None),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.device("cuda:3"),
    torch.device("cpu"),
    Path("a/b.txt"),
    datetime(2024, 2, 29, 1, 2, 3, 45),
    datetime(2024, 2, 29, tzinfo=timezone.utc),
    datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    timedelta(days=-3, microseconds=7),
    timedelta.max,
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.str_("text"),
    np.datetime64("2024-02-29"),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}-{value!r:.20}")
def test_round_trip_keeps_value_and_type(value: object) -> None:
    result = loads(dumps(value))
    assert result == value
    assert type(result) is type(value)


def test_bool_and_int_are_not_mixed_up() -> None:
    result = loads(dumps([True, 1, False, 0, 1.0]))
    assert [type(item) for item in result] == [bool, int, bool, int, float]  # type: ignore[union-attr]


def test_negative_zero_and_nan_keep_their_bits() -> None:
    for value in (-0.0, float("nan"), struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\x7f")[0]):
        result = loads(dumps(value))
        assert struct.pack("<d", result) == struct.pack("<d", value)


def test_dict_order_is_kept() -> None:
    keys = list("zyxabc")
    result = loads(dumps(dict.fromkeys(keys)))
    assert list(result) == keys  # type: ignore[call-overload]


def test_ordered_dict_stays_one() -> None:
    value = OrderedDict(b=1, a=2)
    result = loads(dumps(value))
    assert type(result) is OrderedDict
    assert list(result.items()) == list(value.items())


def test_fold_of_a_datetime_is_kept() -> None:
    result = loads(dumps(datetime(2024, 10, 27, 2, 30, fold=1)))
    assert isinstance(result, datetime)
    assert result.fold == 1


@pytest.mark.parametrize("dtype", DTYPE_OF_CODE.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_tensor_round_trip_is_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    result = loads(dumps(tensor))
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype) == (tensor.shape, dtype)
    flat = result.reshape(-1).view(torch.uint8) if count else result.new_empty(0)
    assert flat.tolist() == raw.tolist()


def test_tensor_that_is_strided_or_conjugated_or_wants_gradients() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (base.t(), base[:, 1:3], base.expand(2, 3, 4), base[1]):
        assert torch.equal(loads(dumps(tensor)), tensor)  # type: ignore[arg-type]
    complex_tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(loads(dumps(complex_tensor.conj())), complex_tensor.conj())  # type: ignore[arg-type]
    negative = complex_tensor.conj().imag
    assert torch.equal(loads(dumps(negative)), negative)  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(base.clone())
    result = loads(dumps({"weight": parameter}))
    assert type(result["weight"]) is torch.Tensor  # type: ignore[index]
    assert not result["weight"].requires_grad  # type: ignore[index]


def test_tensor_owns_its_memory() -> None:
    data = dumps(torch.zeros(3))
    first, second = loads(data), loads(data)
    first.add_(1)  # type: ignore[attr-defined]
    assert second.tolist() == [0, 0, 0]  # type: ignore[attr-defined]
    assert loads(data).tolist() == [0, 0, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 3), np.float32),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array([True, False]),
        np.array([1, 2], dtype=">i4"),
        np.array(["2024-01-01"], dtype="datetime64[ns]"),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_array_round_trip(array: np.ndarray[Any, Any]) -> None:
    result = loads(dumps(array))
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert np.array_equal(result, array)
    result.flags.writeable = True


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "obj: builtins.object is not a supported type"),
        ({"a": [0, 1, object()]}, r"obj\['a'\]\[2\]: builtins.object"),
        ({"p": Point(1, 2)}, r"obj\['p'\]: .*Point is a named tuple; send value._asdict"),
        ([Color.RED], r"obj\[0\]: .*Color would arrive as a plain int"),
        (slice(0, print), r"obj.stop: .*builtin_function_or_method"),
        ({1: {print: 2}}, r"obj\[1\]\[<built-in function print>\]"),
        (torch.empty(2, device="meta"), "a meta tensor has no data"),
        (torch.eye(2).to_sparse(), "sparse_coo tensor is not supported"),
        (torch.zeros(2).as_subclass(TaggedTensor), "TaggedTensor would arrive as a plain Tensor"),
        (np.array([object()]), "numpy dtype object"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy dtype"),
        (datetime(2024, 1, 1, tzinfo=Zone()), r"astimezone\(timezone.utc\)"),
        (PurePosixPath("a"), "PurePosixPath is not a supported type"),
        (lambda: None, "function is not a supported type"),
        (bytearray(b"x"), "bytearray is not a supported type"),
    ],
)
def test_unsupported_value_is_named_with_its_place(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dumps(value)


def test_depth_is_limited_on_both_sides() -> None:
    assert loads(dumps(_zeros(MAX_DEPTH))) == _zeros(MAX_DEPTH)
    with pytest.raises(TypeError, match="nested deeper than 100"):
        dumps(_zeros(MAX_DEPTH + 1))
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        dumps(loop)
    bomb = HEADER + (bytes([Tag.LIST]) + SIZE.pack(1)) * 100_000 + bytes([Tag.NONE])
    with pytest.raises(CommunicationError, match="nested deeper than 100"):
        loads(bomb)


def _message(*parts: int | bytes) -> bytes:
    return HEADER + b"".join(bytes([p]) if isinstance(p, int) else p for p in parts)


HUGE = SIZE.pack(1 << 60)
MALFORMED = {
    "empty": b"",
    "other magic": b"\x80\x04N.",
    "other version": HEADER[:3] + b"\x02" + bytes([Tag.NONE]),
    "header only": HEADER,
    "unknown tag": _message(200),
    "trailing bytes": _message(Tag.NONE, Tag.NONE),
    "short int": _message(Tag.INT64, b"\0\0"),
    "huge text": _message(Tag.STR, HUGE),
    "huge bytes": _message(Tag.BYTES, HUGE, b"x"),
    "huge list": _message(Tag.LIST, HUGE),
    "huge dict": _message(Tag.DICT, HUGE),
    "huge integer": _message(Tag.BIG_INT, HUGE),
    "text not utf-8": _message(Tag.SHORT_STR, 1, b"\xff"),
    "text cut": _message(Tag.SHORT_STR, 9, b"abc"),
    "unhashable key": _message(Tag.DICT, SIZE.pack(1), Tag.LIST, SIZE.pack(0), Tag.NONE),
    "same key twice": _message(Tag.DICT, SIZE.pack(2), bytes([Tag.TRUE, Tag.NONE]) * 2),
    "same value twice": _message(Tag.SET, SIZE.pack(2), bytes([Tag.TRUE]) * 2),
    "unknown dtype": _message(Tag.TORCH_DTYPE, 255),
    "unknown device": _message(Tag.TORCH_DEVICE, dumps("nonsense")[len(HEADER) :]),
    "device not text": _message(Tag.TORCH_DEVICE, Tag.NONE),
    "negative torch size": _message(Tag.TORCH_SIZE, SIZE.pack(1), Tag.NONE),
    "tensor larger than its data": _message(Tag.TENSOR, 11, 1, SIZE.pack(1 << 40), HUGE),
    "tensor data disagrees": _message(Tag.TENSOR, 11, 1, SIZE.pack(2), SIZE.pack(4), b"\0" * 4),
    "tensor with 200 dims": _message(Tag.TENSOR, 11, 200, SIZE.pack(1) * 200),
    "tensor huge and empty": _message(Tag.TENSOR, 11, 3, HUGE, HUGE, SIZE.pack(0), SIZE.pack(0)),
    "tensor dimension beyond int64": _message(
        Tag.TENSOR, 11, 2, SIZE.pack(2**64 - 1), SIZE.pack(0), SIZE.pack(0)
    ),
    "bool tensor holds 2": _message(Tag.TENSOR, 0, 1, SIZE.pack(1), SIZE.pack(1), b"\x02"),
    "array of objects": _message(Tag.NUMPY_ARRAY, 2, b"|O", 1, SIZE.pack(1), SIZE.pack(8), HUGE),
    "array of records": _message(Tag.NUMPY_ARRAY, 7, b"<i4,<i4", 0, SIZE.pack(8), HUGE),
    "array of nothing": _message(Tag.NUMPY_ARRAY, 3, b"<U0", 1, HUGE, SIZE.pack(0)),
    "datetime is no date": _message(Tag.DATETIME, Tag.SHORT_STR, 1, b"x", 0, Tag.NONE),
    "datetime offset is text": _message(
        Tag.DATETIME, Tag.SHORT_STR, 10, b"2024-01-01", 0, Tag.SHORT_STR, 0
    ),
    "timedelta overflows": _message(Tag.TIMEDELTA, SIZE.pack(1 << 62), SIZE.pack(0) * 2),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(CommunicationError, match=r"Malformed message of \d+ bytes, near byte"):
        loads(data)


def test_every_prefix_of_a_message_is_refused() -> None:
    data = dumps({"a": [1, 2.5, "text", b"raw"], "t": torch.ones(2), "n": np.ones(2), "s": {1}})
    for end in range(len(data)):
        with pytest.raises(CommunicationError):
            loads(data[:end])


def test_views_and_bytearrays_are_accepted() -> None:
    data = dumps([1, "a"])
    assert loads(memoryview(data)) == loads(bytearray(data)) == [1, "a"]


SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.timedeltas(),
    st.datetimes(),
    st.sampled_from([torch.float32, torch.Size([1, 2]), torch.device("cuda", 1), Path("x")]),
)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.sets(KEYS, max_size=4),
    )


OBJECTS = st.recursive(SCALARS, _containers, max_leaves=12)


@settings(max_examples=300, deadline=None)
@given(OBJECTS)
def test_any_supported_object_round_trips(value: object) -> None:
    result = loads(dumps(value))
    assert result == value
    assert type(result) is type(value)
    assert _shape_of(result) == _shape_of(value)


def _shape_of(value: Any) -> Any:
    """Return the types inside a value, because 1 == True == 1.0."""
    if isinstance(value, dict):
        return [(_shape_of(key), _shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(_shape_of, value)]
    return type(value)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_raise_anything_else(data: bytes, with_header: bool) -> None:
    _load_or_refuse(HEADER + data if with_header else data)


@settings(max_examples=500, deadline=None)
@given(OBJECTS, st.data())
def test_damaged_messages_never_raise_anything_else(value: object, data: st.DataObject) -> None:
    message = bytearray(dumps([value, torch.ones(2, 2), np.ones(3), slice(1)]))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(message) - 1))
        message[position] = data.draw(st.integers(0, 255))
    _load_or_refuse(bytes(message))


def _load_or_refuse(message: bytes) -> None:
    with contextlib.suppress(CommunicationError):
        loads(message)
