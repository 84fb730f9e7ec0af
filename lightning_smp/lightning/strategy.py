"""The strategy: where Lightning's hooks meet the engine."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.config import resolve_config
from lightning_smp.engine import PipelineEngine
from lightning_smp.engine.channels import Channels, Directions, make_directions
from lightning_smp.engine.control import Control
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.clip import clip_grad_norm
from lightning_smp.lightning.partitioning import (
    install_units,
    place_weights,
    plan_model,
    sync_weights,
)
from lightning_smp.lightning.refusals import check_trainer
from lightning_smp.lightning.scaler import make_scaler
from lightning_smp.lightning.steps import Steps
from lightning_smp.partitioning import report
from lightning_smp.placed.metrics import find_metrics
from lightning_smp.placed.random import DrawState, mix_seed, seed_everywhere
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.seeding import SeededUnits
from lightning_smp.weights.ownership import Ownership, materialize
from lightning_smp.weights.sharing import SharingGroups
from lightning_smp.wire import broadcast_object

__all__ = ["StrategyCore", "make_strategy_class"]


class StrategyCore(Steps):
    """What the strategy does, whichever Lightning package its base class comes from.

    The class that users see is made by `make_strategy_class`; this one comes before
    ``ParallelStrategy`` in its order of bases.
    """

    strategy_name = "smp"

    def __init__(
        self,
        pipeline_parallel_degree: int | None = None,
        tensor_parallel_degree: int | None = None,
        microbatches: int | None = None,
        pipeline: Literal["simple", "interleaved"] | None = None,
        placement_strategy: str | None = None,
        active_microbatches: int | None = None,
        auto_partition: bool | None = None,
        default_partition: int | None = None,
        memory_weight: float | None = None,
        optimize: Literal["memory", "speed"] | None = None,
        prescaled_batch: bool | None = None,
        drop_last: bool | None = None,
        tied_parameters: Literal["auto", "together", "mirrored"] | None = None,
        reproducible: bool | None = None,
        batch_source: Literal["each", "leader"] | None = None,
        bucket_cap_mb: float | None = None,
        timeout: float | None = None,
        config: dict[str, Any] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
    ) -> None:
        """Reads the configuration; later wins: defaults, environment, ``config``, arguments.

        Args:
            pipeline_parallel_degree: number of stages.
            tensor_parallel_degree: ranks that split one module.
            microbatches: parts of a batch that are in the pipeline at once.
            pipeline: order of forwards and backwards.
            placement_strategy: "cluster", "spread" or an order of the letters D, P and T.
            active_microbatches: most microbatches in flight on a stage.
            auto_partition: whether to split the model by cost.
            default_partition: stage of modules that are assigned to none.
            memory_weight: balance of compute (0) and memory (1) in the split.
            optimize: sets the default of ``memory_weight``.
            prescaled_batch: whether the ranks of a tensor-parallel group hold one batch.
            drop_last: whether training drops a last batch that is short.
            tied_parameters: how parameters shared by several modules are placed.
            reproducible: whether a single stage draws random numbers as several stages do.
            batch_source: "each" rank loads the batch, or one "leader" of each replica.
            bucket_cap_mb: size of the buckets in which gradients are reduced.
            timeout: seconds until a communication fails.
            config: SMP configuration keys.
            accelerator: as in Lightning.
            parallel_devices: as in Lightning; several times the same GPU for debugging.
            cluster_environment: as in Lightning.
            checkpoint_io: as in Lightning.
            precision_plugin: as in Lightning.
            process_group_backend: "gloo" or "nccl"; by default by device.

        Raises:
            ConfigError: lists every invalid key with its smallest fix.
        """
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # type: ignore[call-arg]
        resolved = resolve_config(
            config,
            {
                "pipeline_parallel_degree": pipeline_parallel_degree,
                "tensor_parallel_degree": tensor_parallel_degree,
                "microbatches": microbatches,
                "pipeline": pipeline,
                "placement_strategy": placement_strategy,
                "active_microbatches": active_microbatches,
                "auto_partition": auto_partition,
                "default_partition": default_partition,
                "memory_weight": memory_weight,
                "optimize": optimize,
                "prescaled_batch": prescaled_batch,
                "drop_last": drop_last,
                "tied_parameters": tied_parameters,
                "reproducible": reproducible,
                "batch_source": batch_source,
                "bucket_cap_mb": bucket_cap_mb,
                "timeout": timeout,
            },
        )
        self._start(resolved, process_group_backend)

    def setup(self, trainer: Any) -> None:
        """Prepares the module; the partition itself happens at the first step."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._trainer = trainer
        self._replace_sigterm_handler(trainer)
        fitting = trainer.state.fn == "fit"
        check_trainer(trainer, self.lightning_module, self.config)
        if fitting and self._layer_sync:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model, self.groups.dp)
        self.precision_plugin.convert_module(self.model)
        self._adopt_module()
        if self.groups.pp_size == 1:
            self.model_to_device()
            self._sync_replicas()
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            check_trainer(trainer, self.lightning_module, self.config, self.optimizers)
        self.setup_precision_plugin()
        for metric in find_metrics(self.lightning_module):
            metric.process_group = self.groups.dp  # the ranks of one replica hold equal states
        if fitting and (self.groups.pp_size == 1 or self._ownership is not None):
            self._optimizers_to_device(self.root_device)
        self._seed_replica()

    def _adopt_module(self) -> None:
        """Takes over what an earlier stage or strategy did to the module."""
        module = self.lightning_module
        mark = module.__dict__.get("_smp_mark")
        state = None if mark is None else mark.strategy
        if state is self:
            return
        self._ownership, self._engine, self._sharing = None, None, None
        if isinstance(state, StrategyCore) and state._partition is not None:
            if state._partition.num_stages != self.groups.pp_size:
                raise UnsupportedError(
                    f"this module is split over {state._partition.num_stages} stages, and the "
                    f"strategy has pipeline_parallel_degree={self.groups.pp_size}. Make a new "
                    "module and load a checkpoint, or use the same degree."
                )
            assert state._runtime is not None
            state._runtime.leave_module()
            self._install(state._partition)
        module.__dict__["_smp_mark"] = _Mark(self)

    def model_to_device(self) -> None:
        """Moves the whole module, where there is one stage."""
        self.model.to(self.root_device)

    def setup_precision_plugin(self) -> None:
        """Gives the precision plugin a global norm and a scaler that all ranks agree on."""
        super().setup_precision_plugin()  # type: ignore[misc]
        plugin = self.precision_plugin
        if dist.get_world_size() == 1:
            return
        plugin.clip_grad_by_norm = self._clip_grad_by_norm
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            plugin.scaler = make_scaler(scaler, self.groups.world, self.root_device)

    def _clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        group = self.groups.pp if self.groups.pp_size > 1 else None
        parameters = self.precision_plugin.main_params(optimizer)
        clip_grad_norm(parameters, clip_val, self.ownership, group)

    def _seed_replica(self) -> None:
        """Seeds by dp_rank and gives all stages of a replica one random state."""
        groups, device = self.groups, self.root_device
        given = os.environ.get("PL_GLOBAL_SEED")
        base = int(given) if given else torch.initial_seed() & ((1 << 62) - 1)
        self._seed = broadcast_object(base, 0, groups.world_control)
        if groups.dp_size > 1 and given and groups.dp_rank > 0:
            seed_everywhere(mix_seed(self._seed, groups.dp_rank), device)
        if groups.pp_size > 1:
            state = DrawState(device).to_plain()
            leader = groups.topology.group("pp", groups.rank)[0]
            shared = broadcast_object(state, leader, groups.control)
            DrawState.from_plain(shared, device).restore()

    def _sync_replicas(self) -> None:
        if self.groups.dp_size > 1:
            source = self.groups.topology.group("dp", self.groups.rank)[0]
            sync_weights(self.lightning_module, self.groups.dp, source)

    def _ensure_ready(self, name: str, args: tuple[Any, ...]) -> None:
        """At the first step: splits the model over the stages. Collective over the world."""
        if self._sharing is not None and self._ownership is not None:
            return
        config, groups = self.config, self.groups
        if groups.pp_size > 1 and self._ownership is None:
            precision = self._precision_context(name)

            def call(copy: Any, batch: Any) -> Any:
                with precision():
                    return getattr(copy, name)(batch, *args[1:])

            partition = plan_model(
                self.lightning_module, call, args[0], groups.pp_size,
                Control(groups.topology.group("pp", groups.rank), groups.control),
                memory_weight=config.partition_memory_weight,
                tied_parameters=config.tied_parameters,
                default_partition=config.default_partition,
                manual=None if config.auto_partition else {},
            )  # fmt: skip
            say = self._import("utilities.rank_zero").rank_zero_info  # Lightning's log is shown
            say(report(partition, self.lightning_module))
            self._install(partition)
            self._sync_replicas()
            self._optimizers_to_device(self.root_device)
        if self._ownership is None:
            self._ownership = Ownership.whole(self.lightning_module)
            if config.reproducible:
                self._seeding = SeededUnits(self.lightning_module, self.root_device)
                self._seeding.install()
        self._sharing = self._make_sharing()

    def _directions(self) -> Directions | None:
        """Groups of neighbours, where the backend needs them. Collective over the world."""
        if self._backend != "nccl":
            return None
        timeout = timedelta(seconds=self.config.timeout)
        return make_directions(self.groups.topology, self.groups.rank, timeout)

    def _make_sharing(self) -> SharingGroups:
        """The groups that gradients are summed over. Collective over the world."""
        assert self._ownership is not None
        topology = self.groups.topology
        stage_ranks = [
            [r for r in range(topology.size) if topology.pp_rank(r) == stage]
            for stage in range(topology.pp_size)
        ]
        timeout = timedelta(seconds=self.config.timeout)
        return SharingGroups(
            self._ownership, stage_ranks,
            lambda ranks: dist.new_group(list(ranks), timeout, backend=self._backend),
        )  # fmt: skip

    def _install(self, partition: Any) -> None:
        groups = self.groups
        ranks = groups.topology.group("pp", groups.rank)
        self._partition = partition
        self._runtime = Runtime(groups.pp_rank, groups.pp_size, self.root_device)
        self._ownership = install_units(self.lightning_module, partition, self._runtime)
        place_weights(self.lightning_module, self._ownership, self._runtime, self.optimizers)
        self._engine = PipelineEngine(
            self._runtime,
            Channels(ranks, groups.pp, self.root_device, self._directions()),
            Control(ranks, groups.control),
            pipeline=self.config.pipeline,
            active_microbatches=self.config.active_microbatches,
        )

    def teardown(self) -> None:
        """Moves what this rank holds to the host."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        host = torch.device("cpu")
        self._optimizers_to_device(host)
        if self._ownership is not None and self._engine is not None:
            materialize(self.lightning_module, self._ownership, host)
        elif self.lightning_module is not None:
            self.lightning_module.cpu()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()


def make_strategy_class(pl: ModuleType) -> type[Any]:
    """The strategy class for the Trainers of one Lightning package."""
    fabric = "lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric"
    base = importlib.import_module(f"{pl.__name__}.strategies").ParallelStrategy
    return type(
        "SMPStrategy",
        (StrategyCore, base),
        {"_pl": pl, "_fabric": importlib.import_module(fabric), "__doc__": _DOC},
    )


_DOC = """Trains an unmodified LightningModule with pipeline and data parallelism."""


class _Mark:
    """On a module, the strategy that has prepared it; not part of copies of the module."""

    def __init__(self, strategy: StrategyCore) -> None:
        self.strategy = strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return (type(None), ())
