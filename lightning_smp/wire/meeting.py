"""Meetings of ranks that do the same thing over and over: one round, hardly any work."""

from __future__ import annotations

import struct
from typing import Final

import torch
import torch.distributed as dist

from lightning_smp.wire.transport import BLOCK_BYTES, Kind, pack_block, read_start

__all__ = ["MEETING_BYTES", "Meeting"]

_LENGTH: Final = struct.Struct("<H")
_HEAD: Final = pack_block(Kind.MEETING, b"")
MEETING_BYTES: Final = BLOCK_BYTES - 64
"""The most that a mark and what is said may have together."""


class Meeting:
    """Ranks learn whether all have the same mark, and what each of them says beside it.

    The memory of the messages is kept, and nothing is encoded. A meeting's message is a first block
    as `all_gather_objects` sends it: ranks that come to the one and to the other understand each
    other.

    Args:
        group: a gloo group; this rank is in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._own = bytearray(BLOCK_BYTES)
        self._blocks = [bytearray(BLOCK_BYTES) for _ in self._ranks]
        self._sent = [_tensor_over(self._own)]
        self._received = [[_tensor_over(block) for block in self._blocks]]

    def meet(self, mark: bytes, said: bytes) -> list[bytes] | None:
        """What each rank says, if all have the same mark; else None.

        Collective over the group: all ranks must call, or gather objects. Where this is None, all
        must gather objects next: those that do already wait for it.

        Args:
            mark: what must be equal.
            said: a few bytes; with the mark at most `MEETING_BYTES`.

        Returns:
            What is said, by rank in the group.

        Raises:
            CommunicationError: a message is malformed.
        """
        assert len(mark) + len(said) <= MEETING_BYTES, "a meeting is for a few bytes"
        head = _HEAD + _LENGTH.pack(len(mark)) + mark
        message = head + _LENGTH.pack(len(said)) + said
        self._own[: len(message)] = message
        self._group.allgather(self._received, self._sent).wait()
        if not all([block.startswith(head) for block in self._blocks]):
            for block, rank in zip(self._blocks, self._ranks, strict=True):
                read_start(block, rank)  # is it a message at all?
            return None
        at = len(head) + _LENGTH.size
        lengths = [_LENGTH.unpack_from(block, len(head))[0] for block in self._blocks]
        return [
            bytes(block[at : at + length])
            for block, length in zip(self._blocks, lengths, strict=True)
        ]


def _tensor_over(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
