"""Object to bytes: one small function per supported type, found by the exact type.

Exact, because a subclass (a named tuple, an enum, a placed tensor) would come back as something
else on the other rank; it is refused instead.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from lightning_smp.wire.layout import (
    CODE_OF_DTYPE,
    DOUBLE,
    HEADER,
    INT64,
    MAX_DEPTH,
    NUMPY_KINDS,
    SIZE,
    Tag,
)

try:
    import numpy as np
except ImportError:  # numpy is optional for torch, hence for us
    np = None  # type: ignore[assignment]

__all__ = ["dumps", "tensor_bytes"]

Write: TypeAlias = Callable[[bytes], None]
Encoder: TypeAlias = Callable[[Any, Write, int], None]


class _RefusedError(Exception):
    """Raised where a value cannot be encoded; containers on the way up add their step."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []


def dumps(obj: object) -> bytes:
    """Return `obj` as bytes that `loads` turns back into an equal object, without pickle.

    Supported: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict and
    OrderedDict (insertion order kept), set, frozenset, slice, torch.Size, torch.dtype,
    torch.device, dense torch.Tensor and nn.Parameter (both come back as a plain CPU tensor
    without gradient), numpy scalars and arrays, pathlib.Path, datetime (with a fixed offset or
    none) and timedelta. Shared references come back as separate objects.

    Raises:
        TypeError: a value of another type, named with its place, e.g. ``obj['a'][2]``.
    """
    parts: list[bytes] = [HEADER]
    try:
        _encode(obj, parts.append, 0)
    except _RefusedError as refusal:
        place = "obj" + "".join(reversed(refusal.steps))
        raise TypeError(f"Cannot send {place}: {refusal.reason}.") from None
    return b"".join(parts)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor in C order (one copy, no numpy needed)."""
    count = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), count) if count else b""


def _encode(value: Any, write: Write, depth: int) -> None:
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        encoder = _encoder_of_numpy(value)
    encoder(value, write, depth)


def _encoder_of_numpy(value: object) -> Encoder:
    """Return the encoder of a numpy array or scalar (of any of its many types), else refuse."""
    if np is not None and type(value) is np.ndarray:
        return _numpy_array
    if np is not None and isinstance(value, np.generic):
        return _numpy_scalar
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        raise _RefusedError(f"{name} is a named tuple; send value._asdict() or tuple(value)")
    bases = [base for base in kind.__mro__[1:] if base in _ENCODERS]
    if bases:
        base = bases[0].__name__
        raise _RefusedError(f"{name} would arrive as a plain {base}; convert it to {base} first")
    raise _RefusedError(f"{name} is not a supported type; send plain containers and tensors")


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise _RefusedError(f"nested deeper than {MAX_DEPTH} levels (or it contains itself)")
    return depth + 1


def _constant(tag: int) -> Encoder:
    data = bytes([tag])
    return lambda value, write, depth: write(data)


def _bool(value: bool, write: Write, depth: int) -> None:
    write(b"\x01" if value else b"\x02")


def _int(value: int, write: Write, depth: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        write(b"\x03" + INT64.pack(value))
        return
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    write(bytes([Tag.BIG_INT]) + SIZE.pack(len(data)) + data)


def _float(value: float, write: Write, depth: int) -> None:
    write(b"\x05" + DOUBLE.pack(value))


def _complex(value: complex, write: Write, depth: int) -> None:
    write(bytes([Tag.COMPLEX]) + DOUBLE.pack(value.real) + DOUBLE.pack(value.imag))


def _str(value: str, write: Write, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    size = len(data)
    if size < 256:
        write(bytes((Tag.SHORT_STR, size)) + data)
    else:
        write(b"\x08" + SIZE.pack(size) + data)


def _bytes(value: bytes, write: Write, depth: int) -> None:
    write(b"\x09" + SIZE.pack(len(value)))
    write(value)


def _items(tag: int) -> Encoder:
    """Return the encoder of a sequence or set: tag, count, values."""
    start = bytes([tag])

    def encode_items(value: Iterable[Any], write: Write, depth: int) -> None:
        items = tuple(value)
        write(start + SIZE.pack(len(items)))
        depth = _deeper(depth)
        for index, item in enumerate(items):
            try:
                _encode(item, write, depth)
            except _RefusedError as refusal:
                refusal.steps.append(f"[{index}]")
                raise

    return encode_items


def _mapping(tag: int) -> Encoder:
    """Return the encoder of a dict: tag, count, then key and value in insertion order."""
    start = bytes([tag])

    def encode_mapping(value: Mapping[Any, Any], write: Write, depth: int) -> None:
        write(start + SIZE.pack(len(value)))
        depth = _deeper(depth)
        for key, item in value.items():
            try:
                _encode(key, write, depth)
                _encode(item, write, depth)
            except _RefusedError as refusal:
                refusal.steps.append(f"[{repr(key)[:80]}]")
                raise

    return encode_mapping


def _slice(value: slice, write: Write, depth: int) -> None:
    write(bytes([Tag.SLICE]))
    depth = _deeper(depth)
    for name in ("start", "stop", "step"):
        try:
            _encode(getattr(value, name), write, depth)
        except _RefusedError as refusal:
            refusal.steps.append(f".{name}")
            raise


def _dtype_code(dtype: torch.dtype) -> int:
    code = CODE_OF_DTYPE.get(dtype)
    if code is None:
        raise _RefusedError(f"{dtype} is not a supported dtype")
    return code


def _dtype(value: torch.dtype, write: Write, depth: int) -> None:
    write(bytes([Tag.TORCH_DTYPE, _dtype_code(value)]))


def _device(value: torch.device, write: Write, depth: int) -> None:
    write(bytes([Tag.TORCH_DEVICE]))
    _str(str(value), write, depth)


def _shape(dims: Iterable[int]) -> bytes:
    sizes = tuple(dims)
    return bytes([len(sizes)]) + b"".join(SIZE.pack(size) for size in sizes)


def _tensor(value: torch.Tensor, write: Write, depth: int) -> None:
    if value.layout is not torch.strided or value.is_quantized:
        raise _RefusedError(f"a {value.layout} tensor is not supported; send a dense one")
    if value.device.type == "meta":
        raise _RefusedError("a meta tensor has no data; send its shape and dtype")
    code = _dtype_code(value.dtype)
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = tensor_bytes(dense)
    write(bytes([Tag.TENSOR, code]) + _shape(value.shape) + SIZE.pack(len(data)))
    write(data)


def _numpy_dtype(dtype: Any) -> bytes:
    if dtype.kind not in NUMPY_KINDS or dtype.itemsize == 0:
        raise _RefusedError(f"the numpy dtype {dtype} is not supported; convert it first")
    name: bytes = dtype.str.encode("ascii")
    return bytes([len(name)]) + name


def _numpy_scalar(value: Any, write: Write, depth: int) -> None:
    data = value.tobytes()
    name = _numpy_dtype(value.dtype)
    write(bytes([Tag.NUMPY_SCALAR]) + name + SIZE.pack(len(data)) + data)


def _numpy_array(value: Any, write: Write, depth: int) -> None:
    name = _numpy_dtype(value.dtype)
    data = value.tobytes()
    write(bytes([Tag.NUMPY_ARRAY]) + name + _shape(value.shape) + SIZE.pack(len(data)))
    write(data)


def _path(value: Path, write: Write, depth: int) -> None:
    write(bytes([Tag.PATH]))
    _str(str(value), write, depth)


def _datetime(value: datetime, write: Write, depth: int) -> None:
    zone = value.tzinfo
    if zone is not None and type(zone) is not timezone:
        raise _RefusedError(
            f"a datetime in {zone!r} is not supported; use value.astimezone(timezone.utc)"
        )
    write(bytes([Tag.DATETIME]))
    _str(value.replace(tzinfo=None).isoformat(), write, depth)
    write(bytes([value.fold]))
    _encode(value.utcoffset(), write, depth)


def _timedelta(value: timedelta, write: Write, depth: int) -> None:
    fields = (value.days, value.seconds, value.microseconds)
    write(bytes([Tag.TIMEDELTA]) + b"".join(map(INT64.pack, fields)))


_ENCODERS: Final[dict[type, Encoder]] = {
    type(None): _constant(Tag.NONE),
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    list: _items(Tag.LIST),
    tuple: _items(Tag.TUPLE),
    dict: _mapping(Tag.DICT),
    OrderedDict: _mapping(Tag.ORDERED_DICT),
    set: _items(Tag.SET),
    frozenset: _items(Tag.FROZENSET),
    slice: _slice,
    torch.Size: _items(Tag.TORCH_SIZE),
    torch.dtype: _dtype,
    torch.device: _device,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    type(Path()): _path,
    datetime: _datetime,
    timedelta: _timedelta,
}
