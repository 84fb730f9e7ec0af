"""Objects as bytes without pickle, and the messages between ranks that carry them."""

from lightning_smp.wire.agree import compare
from lightning_smp.wire.decode import loads
from lightning_smp.wire.encode import dumps
from lightning_smp.wire.meeting import Meeting
from lightning_smp.wire.transport import (
    all_gather_objects,
    broadcast_object,
    recv_object,
    send_object,
)

__all__ = [
    "Meeting",
    "all_gather_objects",
    "broadcast_object",
    "compare",
    "dumps",
    "loads",
    "recv_object",
    "send_object",
]
