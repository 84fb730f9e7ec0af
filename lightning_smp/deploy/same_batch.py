"""The ranks of one replica must hold the same batch: compared by hash, often at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

from lightning_smp.batch_digest import batch_digest
from lightning_smp.deploy.agreement import different_calls
from lightning_smp.errors import CommunicationError
from lightning_smp.wire import compare

__all__ = ["SameBatch", "check_same_batch"]

_ADVICE: Final = (
    'Let one rank load and share it (batch_source="leader"); or make loading equal: keep '
    "use_distributed_sampler=True, call seed_everything(seed, workers=True), give samplers and "
    "augmentations a seed that does not depend on the rank."
)
"""What a user of the Trainer can do."""
_CHECKED_STEPS = 10
_CHECK_EVERY = 100


class SameBatch:
    """Compares batches at the first 10 steps and at every 100th.

    Args:
        group: a gloo group of the ranks that must hold the same batch; None for a single rank.
        ranks: their global ranks, in the order of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks
        self._steps = 0

    def check(self, batch: Any, advice: str = _ADVICE) -> None:
        """Compares the batch of this step. Collective over the group.

        Args:
            batch: this rank's.
            advice: what the user can do about different ones.

        Raises:
            CommunicationError: batches differ; names the ranks and what to do.
        """
        if len(self._ranks) == 1:
            return
        step = self._steps
        self._steps += 1
        if step < _CHECKED_STEPS or step % _CHECK_EVERY == 0:
            check_same_batch(batch_digest(batch), self._group, self._ranks, step, advice)


def check_same_batch(
    digest: bytes, group: dist.ProcessGroup | None, ranks: Sequence[int], step: int,
    advice: str = _ADVICE,
) -> None:  # fmt: skip
    """Raises on every rank if the ranks of one pipeline group hold different batches.

    Collective over `group` (one all-gather of 16 bytes a rank, on the CPU): all its ranks call.

    Args:
        digest: this rank's `batch_digest`.
        group: a gloo group of the ranks that must hold the same batch.
        ranks: their global ranks, in the order of the group.
        step: number of the batch, for the message.
        advice: what the user can do, for the message.

    Raises:
        CommunicationError: digests differ; names the ranks and what to do.
    """
    what = f"the batch of step {step}"
    digests, texts = compare(digest, what, group)
    if not texts:
        return
    if any(text != what for text in texts):
        raise different_calls(ranks, texts)
    ranks_of: dict[bytes, list[int]] = {}
    for rank, value in zip(ranks, digests, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    _raise_different(list(ranks_of.values()), step, advice)


def _raise_different(parts: list[list[int]], step: int, advice: str) -> None:
    parts.sort(key=len, reverse=True)  # stable: among equals, the one of the lowest rank
    others = "; ".join(f"a different one on {_names(part)}" for part in parts[1:])
    raise CommunicationError(
        f"Step {step}: all ranks of a pipeline group need the same batch, but there is one on "
        f"{_names(parts[0])} and {others}. {advice}"
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
