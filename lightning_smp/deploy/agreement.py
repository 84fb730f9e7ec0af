"""What all ranks must have been given alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_smp.config import SMPConfig
from lightning_smp.errors import CommunicationError, ConfigError
from lightning_smp.groups import Groups
from lightning_smp.wire import all_gather_objects

__all__ = ["compare_configurations", "different_calls"]


def compare_configurations(config: SMPConfig, groups: Groups) -> None:
    """Compares the configurations of all ranks. Collective over the world.

    Raises:
        ConfigError: on every rank, if they differ.
    """
    everyone: list[Any] = all_gather_objects(config.as_dict(), groups.world_control)
    different = sorted(
        key for key, value in everyone[0].items() if any(other[key] != value for other in everyone)
    )
    if different:
        values = {key: [config[key] for config in everyone] for key in different}
        raise ConfigError(
            f"the ranks were given different configurations: by rank, {values}. Give every rank "
            "the same arguments and the same SMP_CONFIG."
        )


def different_calls(ranks: Sequence[int], texts: Sequence[str]) -> CommunicationError:
    """The error of ranks that came to different calls.

    Args:
        ranks: global ranks.
        texts: what each is about to do.
    """
    said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
    return CommunicationError(
        f"the ranks came to different calls: {said}. All ranks of a group must make the group's "
        "calls, in one order; look for code that depends on the rank, and for ranks with different "
        "numbers of batches."
    )
