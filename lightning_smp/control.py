"""Small host-side messages between the stages of one pipeline: published results, agreements."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_smp.wire import all_gather_objects, broadcast_object

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

    def publish(self, obj: Any, stage: int) -> Any:
        """Returns the object of ``stage`` on every stage. Collective over pp: all must call."""
        return broadcast_object(obj, self._ranks[stage], self._group)

    def agree(self, obj: Any) -> list[Any]:
        """Returns every stage's object, by stage. Collective over pp: all must call."""
        return all_gather_objects(obj, self._group)
