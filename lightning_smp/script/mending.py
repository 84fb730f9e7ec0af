"""A script that goes on after an error has left a step: together on all ranks, or not at all."""

from __future__ import annotations

from functools import partial

from lightning_smp.calls import Torn
from lightning_smp.errors import CommunicationError
from lightning_smp.failure import FailureWatch
from lightning_smp.process_state import state
from lightning_smp.reunion import Reunion, Standing, obstacle_after

__all__ = ["mend"]


def mend(watch: FailureWatch, torn: Torn) -> None:
    """Before the first call after a torn step: meets the other ranks. Collective over the world.

    Args:
        watch: the run's.
        torn: the step.

    Raises:
        CommunicationError: the ranks cannot go on together; all of them are told.
    """
    groups, cfg, model = state.groups, state.cfg, state.model
    assert cfg is not None
    standing = Standing(
        str(torn), failed=True, torn=True, obstacle=obstacle_after(torn, groups, state.backend)
    )
    reunion = Reunion(groups.rank, groups.world_size, groups.kept)
    try:
        reunion.hold(standing, cfg.timeout, watch.why_missing(in_run=True))
    except CommunicationError as error:
        state.calls.mend = partial(_refuse, str(error))  # at once, the next time
        watch.report(error, groups.pp_rank, "")
        raise
    state.calls.mended()
    if model is not None:
        model.deployment.renew_channels()


def _refuse(reason: str, torn: Torn) -> None:
    del torn
    raise CommunicationError(reason)
