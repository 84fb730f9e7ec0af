"""Send objects between ranks with plain tensor collectives.

Each message starts with one fixed block of `BLOCK_BYTES`, which holds the length and as much of
the payload as fits, so that small objects need a single round; the rest, if any, follows in a
second message. A sender that cannot encode its object sends the reason instead: the receivers
raise, and nobody waits. `lightning_smp.wire.meeting` sends blocks of another kind.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.wire.decode import loads
from lightning_smp.wire.encode import dumps, tensor_bytes

__all__ = [
    "BLOCK_BYTES",
    "Kind",
    "Start",
    "all_gather_objects",
    "broadcast_object",
    "pack_block",
    "read_start",
    "recv_object",
    "send_object",
]

BLOCK_BYTES: Final = 4096
MAX_PAYLOAD_BYTES: Final = 1 << 33
_PREFIX: Final = struct.Struct("<4sBQ")
_MAGIC: Final = b"LSMP"
_ROOM: Final = BLOCK_BYTES - _PREFIX.size
_CPU: Final = torch.device("cpu")


class Kind:
    """What a block starts; one byte."""

    REASON: Final = 0
    OBJECT: Final = 1
    MEETING: Final = 2


@dataclass(frozen=True, slots=True)
class _Payload:
    """What one rank says: an encoded object, or the reason why there is none."""

    data: bytes
    error: Exception | None = None

    @property
    def rest_bytes(self) -> int:
        return max(0, len(self.data) - _ROOM)

    def block(self, device: torch.device) -> torch.Tensor:
        kind = Kind.OBJECT if self.error is None else Kind.REASON
        return _as_tensor(pack_block(kind, self.data), BLOCK_BYTES, device)


class Start(NamedTuple):
    """The first block of a message as received."""

    kind: int
    length: int
    data: bytes

    @property
    def rest_bytes(self) -> int:
        """What follows in a second message."""
        return max(0, self.length - _ROOM)


def broadcast_object(
    obj: object,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> object:
    """Return the `obj` of global rank `src` on every rank of `group`.

    Collective over `group`: every rank must call, in the same order as its other collectives;
    `obj` is ignored where the rank is not `src`. `device` is the one that the group's backend
    works on. `src` gets its own object back, unchanged.

    Raises:
        TypeError: on `src`, the object cannot be encoded (the others raise as well).
        CommunicationError: `src` could not encode, or the message is malformed.
    """
    if dist.get_rank() == src:
        payload = _encode(obj)
        dist.broadcast(payload.block(device), src, group)
        if payload.rest_bytes:
            dist.broadcast(_as_tensor(payload.data[_ROOM:], None, device), src, group)
        _raise_own(payload)
        return obj
    block = _empty(BLOCK_BYTES, device)
    dist.broadcast(block, src, group)
    start = _start_of(block, src)
    rest = _empty(start.rest_bytes, device)
    if start.rest_bytes:
        dist.broadcast(rest, src, group)
    return _finish(start, rest, src)


def all_gather_objects(
    obj: object,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> list[object]:
    """Return the objects of all ranks of `group`, in the order of the group's ranks.

    Collective over `group`: every rank must call. Memory: group size times the longest object.
    This rank's own object comes back unchanged, also in the place of equal ones.

    Raises:
        TypeError: this rank's object cannot be encoded (the others raise as well).
        CommunicationError: another rank could not encode, or a message is malformed.
    """
    payload = _encode(obj)
    there: Any = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(there)
    blocks = [_empty(BLOCK_BYTES, device) for _ in ranks]
    # The group's own method: the checks of dist.all_gather cost as much as the message.
    there.allgather([blocks], [payload.block(device)]).wait()
    starts = [_start_of(block, rank) for block, rank in zip(blocks, ranks, strict=True)]
    if any(start.kind == Kind.MEETING for start in starts):
        return all_gather_objects(obj, group, device)  # those that wanted to meet say it in words
    width = max(start.rest_bytes for start in starts)
    rests = [_empty(width, device) for _ in ranks]
    if width:
        dist.all_gather(rests, _as_tensor(payload.data[_ROOM:], width, device), group)
    _raise_own(payload)
    return [
        obj
        if not width and start.kind == Kind.OBJECT and start.data == payload.data
        else _finish(start, rest[: start.rest_bytes], rank)
        for start, rest, rank in zip(starts, rests, ranks, strict=True)
    ]


def send_object(
    obj: object,
    dst: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> None:
    """Send `obj` to global rank `dst`, which must call `recv_object` with this rank.

    Blocks until the message has left this rank's buffers.

    Raises:
        TypeError: the object cannot be encoded (the receiver raises as well).
    """
    payload = _encode(obj)
    dist.send(payload.block(device), dst, group)
    if payload.rest_bytes:
        dist.send(_as_tensor(payload.data[_ROOM:], None, device), dst, group)
    _raise_own(payload)


def recv_object(
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> object:
    """Return the object that global rank `src` gives to `send_object`; blocks until it is here.

    Raises:
        CommunicationError: `src` could not encode its object, or the message is malformed.
    """
    block = _empty(BLOCK_BYTES, device)
    dist.recv(block, src, group)
    start = _start_of(block, src)
    rest = _empty(start.rest_bytes, device)
    if start.rest_bytes:
        dist.recv(rest, src, group)
    return _finish(start, rest, src)


def _encode(obj: object) -> _Payload:
    try:
        data = dumps(obj)
    except Exception as error:  # told to the peers, then raised by _raise_own
        return _Payload(f"{type(error).__name__}: {error}"[:1000].encode(), error)
    if len(data) > MAX_PAYLOAD_BYTES:
        reason = f"{len(data)} bytes exceed {MAX_PAYLOAD_BYTES}; send the tensors themselves"
        return _Payload(reason.encode(), CommunicationError(f"Object too large: {reason}."))
    return _Payload(data)


def _raise_own(payload: _Payload) -> None:
    if payload.error is not None:
        raise payload.error


def _empty(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _as_tensor(data: bytes, width: int | None, device: torch.device) -> torch.Tensor:
    """Return `data` as a uint8 tensor, zero-filled up to `width` bytes."""
    buffer = bytearray(len(data) if width is None else width)
    buffer[: len(data)] = data
    return torch.frombuffer(buffer, dtype=torch.uint8).to(device)


def pack_block(kind: int, data: bytes) -> bytes:
    """The first block of a message without its padding."""
    return _PREFIX.pack(_MAGIC, kind, len(data)) + data[:_ROOM]


def read_start(block: bytes | bytearray, src: int) -> Start:
    """Reads the first block of a message from global rank ``src``."""
    magic, kind, length = _PREFIX.unpack_from(block)
    if magic != _MAGIC or length > MAX_PAYLOAD_BYTES:
        raise CommunicationError(
            f"Expected an object from rank {src}, met a block that starts with {magic!r} and "
            f"declares {length} bytes. Do all ranks issue the same collectives in the same order?"
        )
    return Start(kind, length, bytes(block[_PREFIX.size : _PREFIX.size + min(length, _ROOM)]))


def _start_of(block: torch.Tensor, src: int) -> Start:
    return read_start(tensor_bytes(block.cpu()), src)


def _finish(start: Start, rest: torch.Tensor, src: int) -> object:
    data = start.data + tensor_bytes(rest.cpu())
    if start.kind != Kind.OBJECT:
        reason = data.decode("utf-8", "replace")
        raise CommunicationError(f"Rank {src} could not encode its object: {reason}")
    return loads(data)
