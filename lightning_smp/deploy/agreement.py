"""What all ranks must have been given alike."""

from __future__ import annotations

from typing import Any

from lightning_smp.config import SMPConfig
from lightning_smp.errors import ConfigError
from lightning_smp.groups import Groups
from lightning_smp.wire import all_gather_objects

__all__ = ["compare_configurations"]


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
