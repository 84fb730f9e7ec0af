"""The strategy: where Lightning's hooks meet the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.batch_digest import batch_digest
from lightning_smp.channels import Channels
from lightning_smp.config import SMPConfig, resolve_config
from lightning_smp.control import Control
from lightning_smp.engine import PipelineEngine
from lightning_smp.errors import ConfigError, UnsupportedError
from lightning_smp.gradients import GradientReducer
from lightning_smp.groups import Groups
from lightning_smp.lightning.batch_broadcast import broadcast_batch
from lightning_smp.lightning.checkpoint import (
    gather_optimizer_state,
    gather_state_dict,
    load_full_state_dict,
    load_optimizer_state,
)
from lightning_smp.lightning.clip import clip_grad_norm, global_clip
from lightning_smp.lightning.data import check_same_batch, prepare_dataloader
from lightning_smp.failure import FailureWatch
from lightning_smp.lightning.handoff import GradientStash, hand_off
from lightning_smp.lightning.partitioning import (
    install_units,
    log_report,
    place_weights,
    plan_model,
    sync_weights,
)
from lightning_smp.lightning.refusals import check_trainer
from lightning_smp.lightning.scaler import make_scaler
from lightning_smp.lightning.stepper import Stepper
from lightning_smp.collect import PipelineLinks
from lightning_smp.ownership import Ownership
from lightning_smp.placed.metrics import find_metrics
from lightning_smp.placed.random import DrawState, mix_seed, seed_everywhere
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.seeding import SeededUnits
from lightning_smp.sharing import SharingGroups, WeightAgreement
from lightning_smp.wire import broadcast_object

__all__ = ["make_strategy_class"]

_logger = logging.getLogger(__name__)
_CHECKED_STEPS = 10
_CHECK_EVERY = 100
_STAGES = {"training_step": 0, "validation_step": 1, "test_step": 2, "predict_step": 3}


class StrategyCore:
    """What the strategy does, whichever Lightning package its base class comes from.

    The class that users see is made by `make_strategy_class`; this one comes before
    ``ParallelStrategy`` in its order of bases.
    """

    strategy_name = "smp"
    _pl: ModuleType
    _fabric: ModuleType

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
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
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
            start_method: how Lightning's launcher starts processes.

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
        self.config: SMPConfig = resolve_config(
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
        self._backend = process_group_backend
        self._start_method = start_method
        self._num_nodes = 1
        self._layer_sync: Any = None
        self._trainer: Any = None
        self._groups: Groups | None = None
        self._ownership: Ownership | None = None
        self._engine: PipelineEngine | None = None
        self._runtime: Runtime | None = None
        self._partition: Any = None
        self._sharing: SharingGroups | None = None
        self._seeding: SeededUnits | None = None
        self._seed = 0
        self._block_sync = False
        self._steps_checked = 0
        self._watch: FailureWatch | None = None

    # ---- ranks and launch -------------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """The process groups of this run."""
        if self._groups is None:
            raise ConfigError(
                "the process groups were asked for before the trainer started; they exist from "
                "`setup` on."
            )
        return self._groups

    @property
    def ownership(self) -> Ownership:
        """Which stage holds which parameter."""
        if self._ownership is None:
            return Ownership.whole(self.lightning_module)
        return self._ownership

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas share the data.

        With one replica the user's own samplers stay, so that the batches are those of one device;
        Lightning would shuffle every training loader of a distributed strategy.
        """
        return self._groups is None or self._groups.dp_size > 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        devices = self.parallel_devices
        assert devices is not None
        return devices[self.local_rank]

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the groups that carry tensors."""
        return self._backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of one replica load the same samples."""
        return {"num_replicas": self.groups.dp_size, "rank": self.groups.dp_rank}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and the loggers who this rank is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero = self._import("utilities.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank
        self._import_fabric("utilities.rank_zero").rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            module = self._import("strategies.launchers.subprocess_script")
            self._launcher = module._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            module = self._import("strategies.launchers.multiprocessing")
            self._launcher = module._MultiProcessingLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Makes the process groups and seeds. Collective over the world."""
        super().setup_environment()  # type: ignore[misc]
        if self.root_device.type == "mps":
            raise UnsupportedError(
                "strategy='smp' on MPS: there are no collectives there; use accelerator='cpu'."
            )
        self._import_fabric("utilities.seed").reset_seed()
        self.set_world_ranks()
        if self._backend is None:
            self._backend = _default_backend(self.root_device, self.parallel_devices)
        timeout = timedelta(seconds=self.config.timeout)
        if not dist.is_initialized():
            init = self._import_fabric("utilities.distributed")._init_dist_connection
            init(self.cluster_environment, self._backend, timeout=timeout)
        if self._groups is None:
            world = dist.get_world_size()
            topology = self.config.topology(world)
            self._groups = Groups.build(topology, dist.get_rank(), self._backend, timeout)
            self._compare_configurations()
        if self._watch is None:
            self._watch = FailureWatch(self.global_rank)

    def _compare_configurations(self) -> None:
        mine = self.config.fingerprint()
        first = broadcast_object(mine, 0, self.groups.world_control)
        flags = torch.tensor([int(mine != first)])
        dist.all_reduce(flags, group=self.groups.world_control)
        if int(flags):
            raise ConfigError(
                "the ranks were given different configurations (arguments or SMP_CONFIG): make "
                "them equal on every rank."
            )

    # ---- set-up -------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepares the module; the partition itself happens at the first step."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._trainer = trainer
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
            self._optimizers_to_device()
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
            for unit in state._runtime.units:
                unit.remove()
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

    def _optimizers_to_device(self) -> None:
        for optimizer in self.optimizers:
            self._import_fabric("utilities.optimizer")._optimizer_to_device(
                optimizer, self.root_device
            )

    def _seed_replica(self) -> None:
        """Seeds by dp_rank and gives all stages of a replica one random state."""
        import os

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

    # ---- partition ------------------------------------------------------------------------------

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
                memory_weight=config.partition_memory_weight, tied_parameters=config.tied_parameters,
                default_partition=config.default_partition,
                manual=None if config.auto_partition else {},
            )  # fmt: skip
            if self.is_global_zero:
                log_report(partition, self.lightning_module)
            self._install(partition)
            self._sync_replicas()
            self._optimizers_to_device()
        if self._ownership is None:
            self._ownership = Ownership.whole(self.lightning_module)
            if config.reproducible:
                self._seeding = SeededUnits(self.lightning_module, self.root_device)
                self._seeding.install()
        topology = groups.topology
        stage_ranks = [
            [r for r in range(topology.size) if topology.pp_rank(r) == stage]
            for stage in range(groups.pp_size)
        ]
        timeout = timedelta(seconds=config.timeout)
        self._sharing = SharingGroups(
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
            Channels(ranks, groups.pp, self.root_device),
            Control(ranks, groups.control),
            pipeline=self.config.pipeline,
            active_microbatches=self.config.active_microbatches,
        )

    # ---- steps ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step, forward and backward. Collective over the world."""
        args = (*args, *kwargs.values())
        module = self.lightning_module
        manual = not module.automatic_optimization
        config = self.config
        if manual and config.microbatches > 1:
            raise UnsupportedError(
                f"manual optimization with microbatches={config.microbatches}: the step calls "
                "backward and optimizer.step itself, so it cannot be cut into microbatches. Set "
                "microbatches=1."
            )
        args = self._same_batch(args, config.microbatches)
        self._ensure_ready("training_step", self._first_piece(args, config.microbatches))
        stepper = self._stepper("training_step")
        seed = (self._seed, self.groups.dp_rank, 0, self._trainer.fit_loop.total_batch_idx)
        skip = self._trainer.fit_loop._skip_backward
        if manual:
            return stepper.run(
                "training_step", args, microbatches=1, allow_uneven=True, seed=seed,
                backward=False, around_backward=self._around_backward,
            ).result  # fmt: skip
        accumulate = self._trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        expected = (1.0 if scaler is None else scaler.get_scale()) / accumulate
        stash = GradientStash(p for p in self.ownership.parameters() if self.ownership.is_local(p))
        try:
            output = stepper.run(
                "training_step", args, microbatches=config.microbatches,
                allow_uneven=not config.drop_last, seed=seed, backward=not skip,
                loss_scale=expected,
            )  # fmt: skip
        except BaseException:
            stash.restore()
            raise
        stash.close()
        return self._with_hand_off(output, stash, expected)

    def _with_hand_off(self, output: Any, stash: GradientStash, expected: float) -> Any:
        if output.loss is None:
            return output.result
        share = 1.0
        sharing = self._sharing
        assert sharing is not None
        if sharing.dp_group is not None:
            share = WeightAgreement(
                output.weight, sharing.dp_group, len(sharing.dp_ranks), self.root_device
            ).share()

        def install(gradient: torch.Tensor) -> None:
            given = float(gradient) if expected != 1.0 else float(gradient)
            stash.install(output.scale * share * given / expected)
            if not self._block_sync:
                self._reduce_gradients()

        loss = hand_off(output.loss, install)
        if isinstance(output.result, Mapping):
            return {**output.result, "loss": loss}
        return loss

    def _reduce_gradients(self) -> None:
        """Sums the gradients of replicas and mirrored parameters. Collective over the world."""
        assert self._sharing is not None
        reducer = GradientReducer(
            self.ownership, self._sharing, bucket_bytes=int(self.config.bucket_cap_mb * 2**20)
        )
        if reducer.communicates:
            reducer.start(None)
            reducer.finish()

    def _around_backward(self, backward: Callable[[], None]) -> None:
        """Reduces what a backward of a manual step adds to the gradients."""
        local = [p for p in self.ownership.parameters() if self.ownership.is_local(p)]
        stash = GradientStash(local)
        try:
            backward()
            self._average_over_replicas(local)
            self._reduce_gradients()
        except BaseException:
            stash.restore()
            raise
        stash.close()
        stash.install(1.0)

    def _average_over_replicas(self, parameters: list[nn.Parameter]) -> None:
        if self.groups.dp_size > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.groups.dp_size)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's step forward. Collective over pp."""
        return self._evaluate("predict_step", (*args, *kwargs.values()))

    def _evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        microbatches = self.config.microbatches
        args = self._same_batch(args, microbatches)
        with _no_inference_mode():
            self._ensure_ready(name, self._first_piece(args, microbatches))
            self._eval_steps = getattr(self, "_eval_steps", 0) + 1
            seed = (self._seed, self.groups.dp_rank, _STAGES[name], self._eval_steps)
            return self._stepper(name).run(
                name, args, microbatches=microbatches, allow_uneven=True, seed=seed,
                backward=False,
            ).result  # fmt: skip

    def _first_piece(self, args: tuple[Any, ...], microbatches: int) -> tuple[Any, ...]:
        from lightning_smp.batch import split_batch

        if self._ownership is not None:
            return args
        return (split_batch(args[0], microbatches, allow_uneven=True)[0].value, *args[1:])

    def _stepper(self, name: str) -> Stepper:
        return Stepper(
            module=self.lightning_module, engine=self._engine, seeding=self._seeding,
            precision=self._precision_context(name),
        )  # fmt: skip

    def _precision_context(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        plugin = self.precision_plugin
        kind = {"training_step": "train", "validation_step": "val"}.get(name, name.split("_")[0])
        context: Callable[[], AbstractContextManager[Any]] = getattr(plugin, f"{kind}_step_context")
        return context

    def _same_batch(self, args: tuple[Any, ...], microbatches: int) -> tuple[Any, ...]:
        """Makes sure that the stages of a replica hold the same batch. Collective over pp."""
        groups = self.groups
        if groups.pp_size == 1:
            return args
        ranks = groups.topology.group("pp", groups.rank)
        if self.config.batch_source == "leader":
            batch = broadcast_batch(
                args[0], ranks[0], groups.control, groups.pp, self.root_device
            )
            return (batch, *args[1:])
        step = self._steps_checked
        self._steps_checked += 1
        if step < _CHECKED_STEPS or step % _CHECK_EVERY == 0:
            check_same_batch(batch_digest(args[0]), groups.control, ranks, step)
        return args

    def process_dataloader(self, dataloader: Any) -> Any:
        """Gives the ranks of a replica the same batches."""
        import os

        return prepare_dataloader(
            dataloader,
            training=bool(self._trainer is not None and self._trainer.training),
            drop_last=self.config.drop_last and self.config.microbatches > 1,
            dp_rank=self.groups.dp_rank,
            seed_workers=os.environ.get("PL_SEED_WORKERS") == "1",
        )

    # ---- optimization -----------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While a batch only accumulates, its gradients are not reduced."""
        self._block_sync = True
        try:
            yield
        finally:
            self._block_sync = False

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; norms that hooks compute in it are global."""
        group = self.groups.pp if self.groups.pp_size > 1 else None
        run = None if self._runtime is None else self._runtime.active_run()
        outside = nullcontext() if run is None else run.context.outside_outer_mode()
        with global_clip(self.ownership, group), outside:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    # ---- checkpoints --------------------------------------------------------------------------------

    def _links(self) -> PipelineLinks:
        return PipelineLinks.over(self.groups, self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on global rank 0, empty elsewhere. Collective over the world."""
        if self._engine is None:
            return dict(self.lightning_module.state_dict())
        return gather_state_dict(self.lightning_module, self.ownership, self._links())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on global rank 0, empty elsewhere. Collective over the world."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._engine is None:
            return dict(optimizer.state_dict())
        return gather_optimizer_state(optimizer, self.ownership, self._links())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this stage's part of a whole state dict."""
        load_full_state_dict(
            self.lightning_module, checkpoint["state_dict"], self.ownership, strict=strict
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this stage's part of whole optimizer states."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_optimizer_state(optimizer, state, self.ownership)
        if self._engine is not None or self.groups.pp_size == 1:
            self._optimizers_to_device()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Global rank 0 (rdp_rank 0) writes one ordinary file. Collective over the world."""
        filepath = self.broadcast(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Every rank reads the file that rank 0 chose. Collective over the world."""
        checkpoint_path = self.broadcast(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)  # type: ignore[misc]

    # ---- collectives ----------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the replicas. Collective over ``group``, by default over dp."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        group = self._replicas(group)
        size = dist.get_world_size(group)
        if size == 1:
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        if isinstance(op, str):
            op = getattr(dist.ReduceOp, op.upper())
        reduced = tensor.to(self.root_device).contiguous().clone()
        if mean and not reduced.is_floating_point():
            reduced = reduced.to(torch.get_default_dtype())
        dist.all_reduce(reduced, op=op, group=group)
        return reduced.div_(size) if mean else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all (or any) ranks of the world say yes. Collective over the world."""
        count = torch.tensor(int(decision))
        dist.all_reduce(count, group=self.groups.world_control)
        return int(count) == dist.get_world_size() if all else int(count) > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gathers from the replicas, [dp, ...]. Collective over ``group``, by default over dp."""
        module = self._import_fabric("utilities.distributed")
        return module._all_gather_ddp_if_available(
            tensor, group=self._replicas(group), sync_grads=sync_grads
        )

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks. Collective over the world."""
        if dist.is_initialized() and self._groups is not None:
            dist.barrier(group=self.groups.world_control)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of global rank ``src``, sent as plain data. Collective over the world."""
        if self._groups is None or dist.get_world_size() == 1:
            return obj
        return broadcast_object(obj, src, self.groups.world_control)

    def _replicas(self, group: Any) -> Any:
        if group is None or group is dist.group.WORLD:
            return self.groups.dp
        return group

    # ---- the end --------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one stops."""
        if self._watch is not None and self._groups is not None:
            where = "" if self._engine is None else self._engine.position
            self._watch.report(exception, self.groups.pp_rank, where)

    def teardown(self) -> None:
        """Moves what this rank holds to the host."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        cpu = torch.device("cpu")
        fabric = self._import_fabric("utilities.optimizer")
        for optimizer in self.optimizers:
            fabric._optimizer_to_device(optimizer, cpu)
        if self._engine is None and self.lightning_module is not None:
            self.lightning_module.cpu()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    # ---- helpers ----------------------------------------------------------------------------------------

    def _import(self, name: str) -> Any:
        import importlib

        return importlib.import_module(f"{self._pl.__name__}.{name}")

    def _import_fabric(self, name: str) -> Any:
        import importlib

        return importlib.import_module(f"{self._fabric.__name__}.{name}")


def make_strategy_class(pl: ModuleType) -> type:
    """The strategy class for the Trainers of one Lightning package."""
    import importlib

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


def _default_backend(device: torch.device, devices: Any) -> str:
    """NCCL needs a GPU for each process; gloo serves CPUs and processes that share a GPU."""
    if device.type == "cuda" and len(set(devices)) == len(devices):
        return "nccl"
    return "gloo"


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Inference tensors have no version counters, which in-place changes are seen by."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
