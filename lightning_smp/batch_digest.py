"""A short hash of a batch's content, to compare between ranks that must hold the same batch.

Large tensors are not hashed byte by byte: a sample spread over the tensor and the integer sums of
up to 4096 stretches of it are. The sums change with any single changed value and with the order
of the stretches; the sample sees the order inside them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_smp.batch_tree import children_of, is_array, object_attributes
from lightning_smp.wire.encode import tensor_bytes

__all__ = ["DIGEST_BYTES", "batch_digest"]

DIGEST_BYTES = 16
_FULL_BYTES = 1 << 16  # tensors up to this size are hashed entirely
_STRETCHES = 4096
_OBJECT_DEPTH = 3


def batch_digest(batch: Any) -> bytes:
    """Returns `DIGEST_BYTES` bytes that are equal for equal batches.

    Structure, types of containers, shapes, dtypes, tensor contents and plain values (None, bool,
    int, float, complex, str, bytes) count; devices, strides and the state of unknown objects
    without tensors do not. Costs one copy to the host per device that holds tensors, at most
    128 KiB per tensor.
    """
    walk = _Walk()
    with torch.no_grad():
        walk.visit(batch, _OBJECT_DEPTH)
        return walk.finish()


@dataclass(slots=True)
class _Walk:
    """Collects what is hashed: text on the host, and bytes on each device."""

    text: list[bytes] = field(default_factory=list)
    parts: dict[torch.device, list[Tensor]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif is_array(value):
            self._add_array(value)
        elif isinstance(value, (set, frozenset)):
            self._add_set(value, depth)
        elif (children := children_of(value)) is not None:
            self._add_text(f"{type(value).__qualname__}({len(children)}")
            for child in children:
                self._add_text(child.label)
                self.visit(child.value, depth)
        else:
            self._add_leaf(value, depth)

    def finish(self) -> bytes:
        digest = blake2b(digest_size=DIGEST_BYTES)
        for text in self.text:
            digest.update(struct.pack("<Q", len(text)))
            digest.update(text)
        for device in sorted(self.parts, key=str):
            digest.update(tensor_bytes(torch.cat(self.parts[device]).cpu()))
        return digest.digest()

    def _add_text(self, text: str) -> None:
        self.text.append(text.encode("utf-8", "surrogatepass"))

    def _add_leaf(self, value: Any, depth: int) -> None:
        self._add_text(type(value).__qualname__)
        if value is None or isinstance(value, (bool, int, float, complex, str, torch.Size)):
            self._add_text(repr(value))
        elif isinstance(value, bytes):
            self.text.append(value)
        elif depth and id(value) not in self.seen:
            self.seen.add(id(value))
            for name, item in object_attributes(value).items():
                self._add_text(f".{name}")
                self.visit(item, depth - 1)

    def _add_set(self, value: Any, depth: int) -> None:
        """Hashes the members in the order of their digests: a set has none of its own."""
        digests = []
        for item in value:
            walk = _Walk(seen=self.seen)
            walk.visit(item, depth)
            digests.append(walk.finish())
        self._add_text(f"{type(value).__qualname__}({len(digests)}")
        self.text += sorted(digests)

    def _add_array(self, value: Any) -> None:
        if value.dtype.hasobject:
            self._add_text(f"array{value.shape}")
            for item in value.ravel().tolist():
                self.visit(item, _OBJECT_DEPTH)
            return
        self._add_text(f"{value.dtype.str}{value.shape}")
        self._add_bytes(torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8))

    def _add_tensor(self, value: Tensor) -> None:
        self._add_text(f"{value.dtype}{value.layout}")
        for plain in _dense_parts(value.detach()):
            self._add_text(str(tuple(plain.shape)))
            if plain.device.type != "meta" and plain.numel():
                self._add_bytes(_as_bytes(plain))

    def _add_bytes(self, data: Tensor) -> None:
        parts = self.parts.setdefault(data.device, [])
        parts += [data] if data.numel() <= _FULL_BYTES else _digest_of_large(data)


def _dense_parts(value: Tensor) -> list[Tensor]:
    """Returns the dense tensors that a tensor of any layout is made of."""
    if value.is_nested:
        return list(value.unbind())
    if value.layout == torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    if value.layout != torch.strided:
        return [value.to_dense()]
    return [value]


def _as_bytes(value: Tensor) -> Tensor:
    """Returns the content of a dense tensor as a flat uint8 tensor."""
    if value.is_quantized:
        value = value.int_repr()
    value = value.resolve_conj().resolve_neg().contiguous().view(-1)
    if value.is_complex():
        value = torch.view_as_real(value).reshape(-1)
    return value.view(torch.uint8)


def _digest_of_large(data: Tensor) -> list[Tensor]:
    """Returns at most 128 KiB that stand for more than `_FULL_BYTES` bytes.

    Blocks of 64 bytes at even distances, the sums of 4096 stretches as 64-bit integers (wrapping
    around), and the bytes that do not fill a stretch.
    """
    if data.storage_offset() % 8:
        data = data.clone()  # a view as 64-bit integers must start at a multiple of 8 bytes
    words = data.numel() // 8
    width = words // _STRETCHES
    body = data[: width * _STRETCHES * 8]
    rest = data[body.numel() :]
    sums = body.view(torch.int64).view(_STRETCHES, width).sum(1)
    blocks = data[: data.numel() // 64 * 64].view(-1, 64)
    stride = -(-data.numel() // _FULL_BYTES)
    sample = blocks[::stride].reshape(-1)
    return [sums.view(torch.uint8), sample, rest]
