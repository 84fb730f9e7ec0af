"""The strategy: where Lightning's hooks meet the engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.amp import make_scaler
from lightning_smp.config import resolve_config
from lightning_smp.deferred import deferring, realize_module
from lightning_smp.deploy.deployment import Deployment
from lightning_smp.deploy.distributing import distribute_model
from lightning_smp.deploy.rebalancing import Rebalancer
from lightning_smp.errors import UnsupportedError
from lightning_smp.lightning.refusals import check_trainer
from lightning_smp.lightning.steps import Steps
from lightning_smp.placed.metrics import find_metrics, set_metric_group
from lightning_smp.process_state import state
from lightning_smp.weights.clip import clip_grad_norm, places_of
from lightning_smp.weights.elementwise import check_split_updates

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
        tensor_parallel_modules: str | Mapping[str, str] | None = None,
        tensor_parallel_weights: str | None = None,
        microbatches: int | None = None,
        pipeline: Literal["simple", "interleaved", "zero_bubble", "auto", "file"] | None = None,
        virtual_pipeline_degree: int | None = None,
        schedule_file: str | None = None,
        activation_limit_mb: float | None = None,
        timeline_every_n_steps: int | None = None,
        rebalance_after_steps: int | None = None,
        compile: bool | None = None,
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
            tensor_parallel_modules: "auto", or name patterns and how they are split.
            tensor_parallel_weights: "slice" of the original's, or "reinit".
            microbatches: parts of a batch that are in the pipeline at once.
            pipeline: order of forwards and backwards.
            virtual_pipeline_degree: contiguous chunks of the model on each stage.
            schedule_file: the order itself, for pipeline="file".
            activation_limit_mb: most MiB of activations on a stage, by estimate.
            timeline_every_n_steps: measure every n-th training step, see docs/timeline.md.
            rebalance_after_steps: measure that many training steps, then move units between the
                stages, see docs/rebalance.md.
            compile: compile each unit, see docs/compile.md.
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
                "tensor_parallel_modules": tensor_parallel_modules,
                "tensor_parallel_weights": tensor_parallel_weights,
                "microbatches": microbatches,
                "pipeline": pipeline,
                "virtual_pipeline_degree": virtual_pipeline_degree,
                "schedule_file": schedule_file,
                "activation_limit_mb": activation_limit_mb,
                "timeline_every_n_steps": timeline_every_n_steps,
                "rebalance_after_steps": rebalance_after_steps,
                "compile": compile,
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
        self._distribute()
        self._adopt_module()
        if self.groups.pp_size == 1:
            self.model_to_device()
            self.deployment.sync_replicas()
        if fitting:
            self._weighted = None  # the first step of each fit tells
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            check_trainer(trainer, self.lightning_module, self.config, self.optimizers)
            split = self.ownership.tensor.by_parameter
            check_split_updates(self.optimizers, split, self.ownership.name_of)
            if self.deployment.norm_group is not None:  # all modules are looked through
                self._norm_places = places_of(self._import("utilities.grads").grad_norm)
        self.setup_precision_plugin()
        for metric in find_metrics(self.lightning_module):
            # The ranks that hold the same batch hold equal states.
            set_metric_group(metric, self.groups.data_group(self.config.prescaled_batch))
        if fitting and (self.groups.pp_size == 1 or self.deployment.is_placed):
            self._optimizers_to_device(self.root_device)
        self._seed_replica()

    def _distribute(self) -> None:
        """Splits modules over the tensor groups, before optimizers exist. Collective over tp."""
        say = self._import("utilities.rank_zero").rank_zero_info
        distribute_model(self.lightning_module, self.config, self.groups, say)

    def _adopt_module(self) -> None:
        """Takes over what an earlier stage or strategy did to the module."""
        module = self.lightning_module
        mark = module.__dict__.get("_smp_mark")
        state = None if mark is None else mark.strategy
        former = state.deployment if isinstance(state, StrategyCore) else None
        if state is self and former is not None and former.groups is self._groups:
            return
        self._is_summed = True  # another module has no gradients yet
        assert self._backend is not None
        self._deployment = Deployment(
            module, self.config, self.groups, self.root_device, self._backend
        )
        self._rebalancer = None
        if self.config.rebalance_after_steps:
            self._rebalancer = Rebalancer(
                self._deployment, self.config.rebalance_after_steps,
                self._import("utilities.rank_zero").rank_zero_info,
            )  # fmt: skip
        partition = None if former is None else former.partition
        if partition is not None and partition.num_stages != self.groups.pp_size:
            raise UnsupportedError(
                f"this module is split over {partition.num_stages} stages, and the strategy has "
                f"pipeline_parallel_degree={self.groups.pp_size}. Make a new module and load a "
                "checkpoint, or use the same degree."
            )
        if former is not None:
            former.leave()
        if partition is not None:
            self._deployment.install(partition, self.optimizers)
        module.__dict__["_smp_mark"] = _Mark(self)

    def model_to_device(self) -> None:
        """Moves the whole module, where there is one stage."""
        realize_module(self.model, self.root_device)
        self.model.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where `configure_model` and `Trainer.init_module` build a module.

        Args:
            empty_init: whether parameters get their memory at the split only; by default if
                ``delayed_parameter_initialization`` is set. They get the values that they would
                have had, so a checkpoint need not follow.
        """
        delays = self.config.delayed_parameter_initialization if empty_init is None else empty_init
        if delays:
            with self.precision_plugin.tensor_init_context(), deferring():
                yield
        else:
            with super().tensor_init_context(empty_init):  # type: ignore[misc]
                yield

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
        parameters = self.precision_plugin.main_params(optimizer)
        with state.calls.collective("clip_gradients", state.replica_axis):
            clip_grad_norm(parameters, clip_val, self.ownership, self.deployment.norm_group)

    def _seed_replica(self) -> None:
        """Seeds by dp_rank and gives all stages of a replica one random state."""
        given = os.environ.get("PL_GLOBAL_SEED")
        self.deployment.seed_replica(int(given) if given else None)

    def _ensure_ready(self, name: str, args: tuple[Any, ...]) -> None:
        """At the first step: splits the model over the stages. Collective over the world."""
        precision = self._precision_context(name)
        was_split = self.deployment.is_split

        def call(copy: Any, batch: Any) -> Any:
            with precision():
                return getattr(copy, name)(batch, *args[1:])

        with state.calls.collective("the placing of the model", "world"):
            self.deployment.ensure_ready(
                call, args[0], optimizers=self.optimizers,
                say=self._import("utilities.rank_zero").rank_zero_info,  # Lightning's log is shown
            )  # fmt: skip
        if self.deployment.is_split and not was_split:
            self._optimizers_to_device(self.root_device)

    def on_train_end(self) -> None:
        """The last batch is done: on all ranks of a tensor group. Collective over tp."""
        self._meet("the end of training")
        super().on_train_end()  # type: ignore[misc]

    def teardown(self) -> None:
        """Moves what this rank holds to the host."""
        if self._watch is not None:
            self._watch.close("is through with its Trainer's run")
            self._watch = None
        host = torch.device("cpu")
        self._optimizers_to_device(host)
        if self._deployment is not None:
            self._deployment.to(host)
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
