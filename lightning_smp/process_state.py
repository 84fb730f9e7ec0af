"""The state of this process's run: the one mutable object of the library, which the API needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_smp.errors import SMPError

if TYPE_CHECKING:
    from lightning_smp.config import SMPConfig
    from lightning_smp.groups import Groups

__all__ = ["State", "state"]


class State:
    """What `lightning_smp.rank()` and its like read.

    Attributes:
        cfg: the configuration of the run, None before it starts.
    """

    def __init__(self) -> None:
        self.cfg: SMPConfig | None = None
        self._groups: Groups | None = None

    @property
    def initialized(self) -> bool:
        """Whether the process groups exist."""
        return self._groups is not None

    @property
    def groups(self) -> Groups:
        """The process groups.

        Raises:
            SMPError: the run has not started.
        """
        if self._groups is None:
            raise SMPError(
                "a rank or group was asked for before the run started: ranks exist from the "
                "LightningModule's setup() on."
            )
        return self._groups

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return int(os.environ.get("LOCAL_RANK", self.groups.rank))

    @property
    def local_size(self) -> int:
        """Number of processes on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.groups.world_size))

    def start(self, cfg: SMPConfig, groups: Groups) -> None:
        """A run starts; a later one takes its place."""
        self.cfg, self._groups = cfg, groups


state = State()
"""The state of this process."""
