"""Compare what ranks are about to do, before they do it."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from lightning_smp.wire.encode import tensor_bytes
from lightning_smp.wire.transport import all_gather_objects

__all__ = ["DIGEST_BYTES", "compare"]

DIGEST_BYTES: Final = 16
_CPU: Final = torch.device("cpu")


def compare(
    digest: bytes, text: str, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> tuple[list[bytes], list[str]]:
    """Return the digests of all ranks of `group` and, if they differ, what each rank says of it.

    Collective over `group`: one all-gather of 16 bytes a rank, and a second one where they differ.
    All comparisons are made by this function, so ranks that come from different places of the
    program understand each other.

    Args:
        digest: 16 bytes.
        text: what this rank is about to do.
        group: the ranks.
        device: the one that the group's backend works on.

    Returns:
        Digests and texts by rank in the group; no texts if all digests are equal.
    """
    assert len(digest) == DIGEST_BYTES, "all ranks send as much"
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group)
    digests = [tensor_bytes(other.cpu()) for other in found]
    if all(other == digest for other in digests):
        return digests, []
    return digests, [str(other) for other in all_gather_objects(text, group, device)]
