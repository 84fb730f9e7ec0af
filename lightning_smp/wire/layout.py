"""The byte layout shared by the encoder and the decoder of the wire; it holds constants only.

A message is ``MAGIC``, one version byte, then one value. A value is one tag byte and its body:

- scalars: fixed width, little endian;
- text and raw bytes: a length (one byte for the short form, eight otherwise), then the bytes;
- containers: an eight-byte count, then that many values (a dict: key, value, key, value, ...);
- tensors and arrays: dtype name, number of dimensions, dimensions, number of bytes, bytes.

Every count is bounded by the bytes that are left, so a decoder can refuse a lie before it
allocates anything.
"""

from __future__ import annotations

import struct
from typing import Final

import torch

__all__ = [
    "CODE_OF_DTYPE",
    "DOUBLE",
    "DTYPE_OF_CODE",
    "HEADER",
    "INT64",
    "MAX_DEPTH",
    "MAX_DIMS",
    "NUMPY_KINDS",
    "SIZE",
    "Tag",
]

HEADER: Final = b"LSW\x01"
MAX_DEPTH: Final = 100
MAX_DIMS: Final = 64
SIZE: Final = struct.Struct("<Q")
INT64: Final = struct.Struct("<q")
DOUBLE: Final = struct.Struct("<d")
NUMPY_KINDS: Final = "biufcSUmM"


class Tag:
    """One byte per kind of value. Plain integers, because the decoder looks up each byte."""

    NONE: Final = 0
    TRUE: Final = 1
    FALSE: Final = 2
    INT64: Final = 3
    BIG_INT: Final = 4
    FLOAT: Final = 5
    COMPLEX: Final = 6
    SHORT_STR: Final = 7
    STR: Final = 8
    BYTES: Final = 9
    LIST: Final = 10
    TUPLE: Final = 11
    DICT: Final = 12
    ORDERED_DICT: Final = 13
    SET: Final = 14
    FROZENSET: Final = 15
    SLICE: Final = 16
    TORCH_SIZE: Final = 17
    TORCH_DTYPE: Final = 18
    TORCH_DEVICE: Final = 19
    TENSOR: Final = 20
    NUMPY_SCALAR: Final = 21
    NUMPY_ARRAY: Final = 22
    PATH: Final = 23
    DATETIME: Final = 24
    TIMEDELTA: Final = 25


# The order is part of the format: append, never insert.
_DTYPE_NAMES: Final = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DTYPE_OF_CODE: Final[dict[int, torch.dtype]] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
CODE_OF_DTYPE: Final[dict[torch.dtype, int]] = {v: k for k, v in DTYPE_OF_CODE.items()}
