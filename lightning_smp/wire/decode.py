"""Bytes to object. Nothing in a message is trusted: a size is checked before memory is taken."""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import torch

from lightning_smp.errors import CommunicationError
from lightning_smp.wire.layout import (
    DOUBLE,
    DTYPE_OF_CODE,
    HEADER,
    INT64,
    MAX_DEPTH,
    MAX_DIMS,
    NUMPY_KINDS,
    SIZE,
    Tag,
)

try:
    import numpy as np
except ImportError:
    np = None  # type: ignore[assignment]

__all__ = ["loads"]


def loads(data: bytes | bytearray | memoryview) -> object:
    """Return the object that `dumps` wrote; tensors are on the CPU and own their memory.

    Raises:
        CommunicationError: the bytes are not one complete message of this version.
    """
    reader = _Reader(bytes(data))
    if reader.take(min(len(HEADER), reader.left())) != HEADER:
        reader.refuse(f"it does not start with {HEADER!r}; do all ranks run the same version?")
    try:
        value = _decode(reader, 0)
    except (struct.error, IndexError):
        reader.refuse("it ends in the middle of a value")
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        if isinstance(error, CommunicationError):
            raise
        reader.refuse(f"{type(error).__name__}: {error}")
    if reader.left():
        reader.refuse(f"{reader.left()} bytes follow the value")
    return value


class _Reader:
    """A position in the message. Bytes, not a view: slicing small pieces is twice as fast."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.end = len(data)
        self.at = 0

    def left(self) -> int:
        return self.end - self.at

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def skip(self, count: int) -> int:
        """Move past `count` bytes and return where they start."""
        start = self.at
        if count > self.end - start:
            self.refuse(f"it declares {count} bytes where {self.left()} are left")
        self.at = start + count
        return start

    def take(self, count: int) -> bytes:
        start = self.skip(count)
        return self.data[start : self.at]

    def view(self, count: int) -> memoryview:
        """Return the next bytes without a copy."""
        start = self.skip(count)
        return memoryview(self.data)[start : self.at]

    def size(self) -> int:
        (value,) = SIZE.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def count(self) -> int:
        """Return a declared number of values; each takes at least one byte."""
        value = self.size()
        if value > self.end - self.at:
            self.refuse(f"it declares {value} values where {self.left()} bytes are left")
        return value

    def refuse(self, reason: str) -> NoReturn:
        raise CommunicationError(
            f"Malformed message of {self.end} bytes, near byte {self.at}: {reason}."
        )


Decoder: TypeAlias = Callable[[_Reader, int], Any]


def _decode(reader: _Reader, depth: int) -> Any:
    at = reader.at
    tag = reader.data[at]
    reader.at = at + 1
    decoder = _DECODERS.get(tag)
    if decoder is None:
        reader.refuse(f"unknown tag {tag}")
    return decoder(reader, depth)


def _deeper(reader: _Reader, depth: int) -> int:
    if depth >= MAX_DEPTH:
        reader.refuse(f"nested deeper than {MAX_DEPTH} levels")
    return depth + 1


def _int64(reader: _Reader, depth: int) -> int:
    at = reader.at
    reader.at = at + 8
    return INT64.unpack_from(reader.data, at)[0]  # type: ignore[no-any-return]


def _big_int(reader: _Reader, depth: int) -> int:
    return int.from_bytes(reader.take(reader.size()), "little", signed=True)


def _float(reader: _Reader, depth: int) -> float:
    at = reader.at
    reader.at = at + 8
    return DOUBLE.unpack_from(reader.data, at)[0]  # type: ignore[no-any-return]


def _complex(reader: _Reader, depth: int) -> complex:
    real = _float(reader, depth)
    return complex(real, _float(reader, depth))


def _short_str(reader: _Reader, depth: int) -> str:
    at = reader.at + 1
    end = at + reader.data[at - 1]
    if end > reader.end:
        reader.refuse("it ends inside a text")
    reader.at = end
    return reader.data[at:end].decode("utf-8", "surrogatepass")


def _str(reader: _Reader, depth: int) -> str:
    return reader.take(reader.size()).decode("utf-8", "surrogatepass")


def _bytes(reader: _Reader, depth: int) -> bytes:
    return reader.take(reader.size())


def _list(reader: _Reader, depth: int) -> list[Any]:
    count = reader.count()
    depth = _deeper(reader, depth)
    return [_decode(reader, depth) for _ in range(count)]


def _tuple(reader: _Reader, depth: int) -> tuple[Any, ...]:
    return tuple(_list(reader, depth))


def _dict(reader: _Reader, depth: int) -> dict[Any, Any]:
    count = reader.count()
    depth = _deeper(reader, depth)
    result = {}
    for _ in range(count):
        key = _decode(reader, depth)
        result[key] = _decode(reader, depth)
    if len(result) != count:
        reader.refuse("a dict holds the same key twice")
    return result


def _ordered_dict(reader: _Reader, depth: int) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(reader, depth))


def _set(reader: _Reader, depth: int) -> set[Any]:
    items = _list(reader, depth)
    result = set(items)
    if len(result) != len(items):
        reader.refuse("a set holds the same value twice")
    return result


def _frozenset(reader: _Reader, depth: int) -> frozenset[Any]:
    return frozenset(_set(reader, depth))


def _slice(reader: _Reader, depth: int) -> slice:
    depth = _deeper(reader, depth)
    start = _decode(reader, depth)
    stop = _decode(reader, depth)
    return slice(start, stop, _decode(reader, depth))


def _torch_size(reader: _Reader, depth: int) -> torch.Size:
    return torch.Size(_list(reader, depth))


def _dtype(reader: _Reader, depth: int) -> torch.dtype:
    code = reader.byte()
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None:
        reader.refuse(f"dtype number {code} is unknown to torch {torch.__version__}")
    return dtype


def _text(reader: _Reader, depth: int) -> str:
    value = _decode(reader, depth)
    if not isinstance(value, str):
        reader.refuse(f"expected text, met {type(value).__name__}")
    return value


def _device(reader: _Reader, depth: int) -> torch.device:
    return torch.device(_text(reader, depth))


def _shape(reader: _Reader) -> list[int]:
    dims = reader.byte()
    if dims > MAX_DIMS:
        reader.refuse(f"{dims} dimensions where at most {MAX_DIMS} are possible")
    return [reader.size() for _ in range(dims)]


def _payload(reader: _Reader, shape: list[int], item_bytes: int) -> memoryview:
    """Return the data of a tensor whose declared size agrees with its shape."""
    size = reader.size()
    if size != prod(shape) * item_bytes:
        reader.refuse(f"{size} bytes of data for shape {shape} of {item_bytes}-byte items")
    return reader.view(size)


def _tensor(reader: _Reader, depth: int) -> torch.Tensor:
    dtype = _dtype(reader, depth)
    shape = _shape(reader)
    data = _payload(reader, shape, dtype.itemsize)
    if dtype is torch.bool and bytes(data).strip(b"\x00\x01"):
        reader.refuse(f"a bool tensor holds the byte {max(data)}")
    result = torch.empty(shape, dtype=dtype)
    if len(data):
        # A view of the tensor's memory: one copy, and no warning about read-only buffers.
        target = (ctypes.c_uint8 * len(data)).from_address(result.data_ptr())
        memoryview(target).cast("B")[:] = data
    return result


def _numpy_dtype(reader: _Reader) -> Any:
    name = reader.take(reader.byte()).decode("ascii")
    if np is None:
        reader.refuse(f"it holds a numpy value ({name}) and numpy is not installed here")
    # Checked before numpy parses it: numpy also accepts comma lists and field specifications.
    if len(name) < 3 or name[0] not in "<>|=" or name[1] not in NUMPY_KINDS or "," in name:
        reader.refuse(f"numpy dtype {name!r} is not allowed")
    dtype = np.dtype(name)
    if dtype.itemsize == 0 or dtype.kind not in NUMPY_KINDS:
        reader.refuse(f"numpy dtype {name!r} is not allowed")
    return dtype


def _numpy_scalar(reader: _Reader, depth: int) -> Any:
    dtype = _numpy_dtype(reader)
    return np.frombuffer(_payload(reader, [], dtype.itemsize), dtype)[0]


def _numpy_array(reader: _Reader, depth: int) -> Any:
    dtype = _numpy_dtype(reader)
    shape = _shape(reader)
    data = _payload(reader, shape, dtype.itemsize)
    if not len(data):
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _path(reader: _Reader, depth: int) -> Path:
    return Path(_text(reader, depth))


def _datetime(reader: _Reader, depth: int) -> datetime:
    value = datetime.fromisoformat(_text(reader, depth)).replace(fold=reader.byte())
    offset = _decode(reader, depth)
    return value if offset is None else value.replace(tzinfo=timezone(offset))


def _timedelta(reader: _Reader, depth: int) -> timedelta:
    days, seconds = _int64(reader, depth), _int64(reader, depth)
    return timedelta(days, seconds, _int64(reader, depth))


_DECODERS: Final[dict[int, Decoder]] = {
    Tag.NONE: lambda reader, depth: None,
    Tag.TRUE: lambda reader, depth: True,
    Tag.FALSE: lambda reader, depth: False,
    Tag.INT64: _int64,
    Tag.BIG_INT: _big_int,
    Tag.FLOAT: _float,
    Tag.COMPLEX: _complex,
    Tag.SHORT_STR: _short_str,
    Tag.STR: _str,
    Tag.BYTES: _bytes,
    Tag.LIST: _list,
    Tag.TUPLE: _tuple,
    Tag.DICT: _dict,
    Tag.ORDERED_DICT: _ordered_dict,
    Tag.SET: _set,
    Tag.FROZENSET: _frozenset,
    Tag.SLICE: _slice,
    Tag.TORCH_SIZE: _torch_size,
    Tag.TORCH_DTYPE: _dtype,
    Tag.TORCH_DEVICE: _device,
    Tag.TENSOR: _tensor,
    Tag.NUMPY_SCALAR: _numpy_scalar,
    Tag.NUMPY_ARRAY: _numpy_array,
    Tag.PATH: _path,
    Tag.DATETIME: _datetime,
    Tag.TIMEDELTA: _timedelta,
}
