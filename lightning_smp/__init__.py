"""Pipeline, tensor and data parallelism for an unmodified LightningModule.

`import lightning_smp` makes `Trainer(strategy="smp")` known to `lightning.pytorch` and to
`pytorch_lightning`, whichever is imported, now or later. Neither torch nor lightning is imported
until a name that needs them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_smp import autoload
from lightning_smp.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    PartitionError,
    ScheduleError,
    SMPError,
    UnsupportedError,
    WorkerAborted,
)

if TYPE_CHECKING:
    from lightning_smp.config import SMPConfig
    from lightning_smp.process_state import state
    from lightning_smp.ranks import (
        dp_rank,
        dp_size,
        get_dp_group,
        get_mp_group,
        get_pp_group,
        get_rdp_group,
        get_tp_group,
        get_world_group,
        is_initialized,
        local_rank,
        local_size,
        mp_rank,
        mp_size,
        pp_rank,
        pp_size,
        rank,
        rdp_rank,
        rdp_size,
        size,
        tp_rank,
        tp_size,
    )
    from lightning_smp.register import SMPStrategy, strategy_class

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "PartitionError",
    "SMPConfig",
    "SMPError",
    "SMPStrategy",
    "ScheduleError",
    "UnsupportedError",
    "WorkerAborted",
    "__version__",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "get_pp_group",
    "get_rdp_group",
    "get_tp_group",
    "get_world_group",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "state",
    "strategy_class",
    "tp_rank",
    "tp_size",
]

_HOMES = {
    "SMPConfig": "config",
    "SMPStrategy": "register",
    "state": "process_state",
    "strategy_class": "register",
}

autoload.arm()


def __getattr__(name: str) -> object:
    """Loads a name that is expensive or needs lightning at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'ranks')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
