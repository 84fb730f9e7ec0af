"""Small host-side messages between the stages of one pipeline: published results, agreements."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_smp.errors import CommunicationError
from lightning_smp.wire import Meeting, all_gather_objects, broadcast_object

__all__ = ["Control"]


class Control:
    """Messages over a gloo group of the pipeline's ranks.

    Args:
        ranks: global rank of each stage.
        group: a gloo group of exactly these ranks, used for nothing else.
    """

    def __init__(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._group = group
        self._meeting = Meeting(group)
        self._broadcasts = [_from(dist.get_group_rank(group, rank)) for rank in ranks]

    def publish(self, obj: Any, stage: int) -> Any:
        """Returns the object of ``stage`` on every stage. Collective over pp: all must call."""
        return broadcast_object(obj, self._ranks[stage], self._group)

    def share(self, tensor: torch.Tensor, stage: int) -> None:
        """Fills a CPU tensor on all stages with that of one. Collective over pp: all must call."""
        self._group.broadcast([tensor], self._broadcasts[stage]).wait()

    def agree(self, obj: Any) -> list[Any]:
        """Returns every stage's object, by stage. Collective over pp: all must call."""
        return all_gather_objects(obj, self._group)

    def meet_at(self, point: str, state: int, said: bytes) -> list[bytes] | None:
        """What each stage says, by stage, if all are at the same point in one state; else None.

        Much cheaper than `agree_at`, which all stages must call next if this is None; a stage that
        knows it from the start, or is somewhere else, calls `agree_at` at once. Collective over
        pp: all must call one of the two.

        Args:
            point: where in the step this stage is, in words.
            state: what must be equal on all stages.
            said: a few bytes.
        """
        return self._meeting.meet(f"{point} {state}".encode(), said)

    def agree_at(self, point: str, obj: Any = None) -> list[Any]:
        """Returns every stage's object, by stage. Collective over pp: all must call.

        Args:
            point: where in the step this stage is, in words.
            obj: plain data.

        Raises:
            CommunicationError: on every stage, if they are not at the same point.
        """
        gathered = all_gather_objects([point, obj], self._group)
        points = [there for there, _ in gathered]
        if any(there != point for there in points):
            said = "; ".join(f"stage {stage}: {there}" for stage, there in enumerate(points))
            raise CommunicationError(
                f"the stages took different paths through the step's code: {said}. All stages "
                "must run the same step on the same data: look for code that depends on the rank, "
                "on local state, on an unseeded draw, or on a value that a submodule left on one "
                "stage."
            )
        return [said for _, said in gathered]


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options
