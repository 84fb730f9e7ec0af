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
    from lightning_smp.script.activation import (
        checkpoint,
        checkpoint_sequential,
        set_activation_checkpointing,
    )
    from lightning_smp.script.checkpoints import resume_from_checkpoint, save_checkpoint
    from lightning_smp.script.creation import delay_param_initialization, model_creation
    from lightning_smp.script.model import DistributedModel
    from lightning_smp.script.optimizer import DistributedOptimizer
    from lightning_smp.script.placing import partition, set_partition
    from lightning_smp.script.saving import load, save
    from lightning_smp.script.starting import init, is_tracing, num_microbatches
    from lightning_smp.script.stepping import step
    from lightning_smp.script.talking import (
        DP_GROUP,
        DP_RANK,
        MP_GROUP,
        MP_RANK,
        PP_GROUP,
        PP_RANK,
        RDP_GROUP,
        RDP_RANK,
        TP_GROUP,
        TP_RANK,
        WORLD,
        WORLD_RANK,
        CommGroup,
        RankType,
        allgather,
        barrier,
        broadcast,
        dp_barrier,
        get_dp_process_group,
        get_mp_process_group,
        get_pp_process_group,
        get_rdp_process_group,
        get_tp_process_group,
        get_world_process_group,
        mp_barrier,
        pp_barrier,
        rdp_barrier,
        recv_from,
        send,
        tp_barrier,
    )
    from lightning_smp.tensor_parallel.marks import set_tensor_parallelism, tensor_parallelism
    from lightning_smp.tensor_parallel.registry import tp_register, tp_register_with_module
    from lightning_smp.verifying import verify

__version__ = "0.1.0"

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "CheckpointError",
    "CommGroup",
    "CommunicationError",
    "ConfigError",
    "DistributedModel",
    "DistributedOptimizer",
    "PartitionError",
    "RankType",
    "SMPConfig",
    "SMPError",
    "SMPStrategy",
    "ScheduleError",
    "UnsupportedError",
    "WorkerAborted",
    "__version__",
    "allgather",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "num_microbatches",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "size",
    "state",
    "step",
    "strategy_class",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "verify",
]

_TALKING = (
    *("DP_GROUP", "DP_RANK", "MP_GROUP", "MP_RANK", "PP_GROUP", "PP_RANK", "RDP_GROUP"),
    *("RDP_RANK", "TP_GROUP", "TP_RANK", "WORLD", "WORLD_RANK", "CommGroup", "RankType"),
    *("allgather", "barrier", "broadcast", "dp_barrier", "get_dp_process_group"),
    *("get_mp_process_group", "get_pp_process_group", "get_rdp_process_group"),
    *("get_tp_process_group", "get_world_process_group", "mp_barrier", "pp_barrier"),
    *("rdp_barrier", "recv_from", "send", "tp_barrier"),
)

_HOMES = {
    "SMPConfig": "config",
    "SMPStrategy": "register",
    "checkpoint": "script.activation",
    "checkpoint_sequential": "script.activation",
    "delay_param_initialization": "script.creation",
    "load": "script.saving",
    "model_creation": "script.creation",
    "partition": "script.placing",
    "set_tensor_parallelism": "tensor_parallel.marks",
    "tensor_parallelism": "tensor_parallel.marks",
    "tp_register": "tensor_parallel.registry",
    "tp_register_with_module": "tensor_parallel.registry",
    "resume_from_checkpoint": "script.checkpoints",
    "save": "script.saving",
    "save_checkpoint": "script.checkpoints",
    "set_activation_checkpointing": "script.activation",
    "set_partition": "script.placing",
    "state": "process_state",
    "strategy_class": "register",
    "verify": "verifying",
    "DistributedModel": "script.model",
    "DistributedOptimizer": "script.optimizer",
    "init": "script.starting",
    "is_tracing": "script.starting",
    "num_microbatches": "script.starting",
    "step": "script.stepping",
    **dict.fromkeys(_TALKING, "script.talking"),
}

_MODULES = ("amp", "compat", "model", "nn", "optimizers", "patches", "state_mod", "utils")
"""Parts of the package that scripts reach as attributes, without an import of their own."""

autoload.arm()


def __getattr__(name: str) -> object:
    """Loads a name that is expensive or needs lightning at its first use (PEP 562)."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'ranks')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
