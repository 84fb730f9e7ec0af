"""Objects between gloo ranks: short and long ones, and senders that cannot encode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.wire import all_gather_objects, broadcast_object, recv_object, send_object
from lightning_smp.wire.meeting import MEETING_BYTES, Meeting
from lightning_smp.wire.transport import BLOCK_BYTES
from tests.support.launch import gloo_group, run_ranks

SIZES = [0, 1, BLOCK_BYTES - 40, BLOCK_BYTES - 25, BLOCK_BYTES, BLOCK_BYTES + 1, 100_000]


def _broadcast(rank: int, world_size: int) -> None:
    with gloo_group():
        for size in SIZES:
            for src in range(world_size):
                value = {"from": src, "data": b"x" * size}
                result = broadcast_object(value if rank == src else None, src)
                assert result == value


def _gather(rank: int, world_size: int) -> None:
    with gloo_group():
        for size in SIZES:
            results = all_gather_objects((rank, "y" * (size * rank)))
            assert results == [(other, "y" * (size * other)) for other in range(world_size)]


def _point_to_point(rank: int, world_size: int) -> None:
    with gloo_group():
        for size in SIZES:
            if rank == 0:
                send_object([size, torch.arange(size)], 1)
                assert recv_object(1) == size
            else:
                received = recv_object(0)
                assert isinstance(received, list)
                assert torch.equal(received[1], torch.arange(received[0]))
                send_object(received[0], 0)


def _sub_group_with_global_ranks(rank: int, world_size: int) -> None:
    with gloo_group():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
        src = 2 + rank % 2
        assert broadcast_object(rank, src, group) == src
        assert all_gather_objects(rank, group) == [rank % 2, src]
        if rank < 2:
            send_object("hello", rank + 2, group)
        else:
            assert recv_object(rank - 2, group) == "hello"


def _sender_fails(rank: int, world_size: int) -> None:
    with gloo_group():
        error, text = (
            (TypeError, r"obj\['f'\].*function")
            if rank == 0
            else (CommunicationError, r"Rank 0 could not encode its object: TypeError.*obj\['f'\]")
        )
        value = {"f": _gather} if rank == 0 else 1
        with pytest.raises(error, match=text):
            broadcast_object(value, 0)
        with pytest.raises(error, match=text):
            all_gather_objects(value)
        with pytest.raises(error, match=text):
            send_object(value, 1) if rank == 0 else recv_object(0)
        assert all_gather_objects(rank) == [0, 1]  # the ranks are still in step


def _stray_message(rank: int, world_size: int) -> None:
    with gloo_group():
        if rank == 0:
            dist.send(torch.ones(BLOCK_BYTES, dtype=torch.uint8), 1)
        else:
            with pytest.raises(CommunicationError, match="Expected an object from rank 0"):
                recv_object(0)


def _meet(rank: int, world_size: int) -> None:
    with gloo_group():
        group = dist.group.WORLD
        assert group is not None
        meeting = Meeting(group)
        for length in (2000, 0, 7):  # the memory is kept: nothing of a longer message is left
            said = [b"%d" % other * length for other in range(world_size)]
            assert meeting.meet(b"here", said[rank]) == said
        most = MEETING_BYTES - 4
        assert meeting.meet(b"here", b"x" * most) == [b"x" * most] * 2
        with pytest.raises(AssertionError):
            meeting.meet(b"here", b"x" * (most + 1))
        assert meeting.meet(b"h" * (rank + 1), b"") is None
        assert meeting.meet(b"h", b"h" if rank else b"") == [b"", b"h"]
        assert all_gather_objects(rank) == [0, 1]  # as after every None


def _meet_others(rank: int, world_size: int) -> None:
    """One rank wants to meet, the other gathers an object: both get all objects."""
    with gloo_group():
        group = dist.group.WORLD
        assert group is not None
        meeting = Meeting(group)
        for size in SIZES:
            value = {"from": rank, "data": "y" * size}
            if rank == 0:
                assert meeting.meet(b"here", b"") is None
            found = all_gather_objects(value)
            assert [one["from"] for one in found] == [0, 1]  # type: ignore[index]
            assert [len(one["data"]) for one in found] == [size] * 2  # type: ignore[index]
        if rank == 0:
            assert meeting.meet(b"here", b"") is None
            with pytest.raises(CommunicationError, match="Rank 1 could not encode its object"):
                all_gather_objects(1)
        else:
            with pytest.raises(TypeError):
                all_gather_objects(_meet)
        assert meeting.meet(b"here", b"%d" % rank) == [b"0", b"1"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "program",
    [
        _broadcast,
        _gather,
        _point_to_point,
        _sender_fails,
        _stray_message,
        _meet,
        _meet_others,
    ],
)
def test_two_ranks(program: object) -> None:
    run_ranks(program, 2)  # type: ignore[arg-type]


@pytest.mark.timeout(90)
def test_sub_groups_are_addressed_by_global_rank() -> None:
    run_ranks(_sub_group_with_global_ranks, 4)
