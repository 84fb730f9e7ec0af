"""A model deployed over the ranks of a job: whole at first, split at the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_smp.config import SMPConfig
from lightning_smp.deferred import realize_module
from lightning_smp.deploy.partitioning import (
    install_units,
    place_weights,
    plan_model,
    reassign_units,
    sync_each,
)
from lightning_smp.deploy.running import run_whole
from lightning_smp.deploy.same_batch import SameBatch
from lightning_smp.deploy.tensor_group import TensorGroup, sync_tensors
from lightning_smp.engine import PipelineEngine, StepPlan
from lightning_smp.engine.channels import Channels, make_directions
from lightning_smp.engine.control import Control
from lightning_smp.groups import Groups
from lightning_smp.partitioning import AtomCost, Partition, find_atoms, report
from lightning_smp.partitioning.marks import marked_stages
from lightning_smp.placed.compiling import UnitCompiler
from lightning_smp.placed.random import (
    DrawState,
    digest_torch_draws,
    mix_seed,
    seed_everywhere,
)
from lightning_smp.placed.runtime import Runtime
from lightning_smp.placed.seeding import SeededUnits
from lightning_smp.process_state import state
from lightning_smp.schedule import read_schedule
from lightning_smp.weights.comm_hook import CommHook
from lightning_smp.weights.gradients import GradientReducer
from lightning_smp.weights.ownership import Ownership, make_whole, materialize
from lightning_smp.weights.sharing import SharingGroups
from lightning_smp.wire import broadcast_object

__all__ = ["Deployment"]

_log = logging.getLogger(__name__)


class Deployment:
    """A model over the ranks of a job.

    Attributes:
        module: the user's model; names of parameters and units are relative to it.
        config: the configuration.
        groups: the process groups.
        device: this rank's device.
        same_batch: compares the batches of the ranks that must hold the same.
        tensor_group: compares what the ranks that split modules with this one do.
        partition: where every unit lives; None before the split, and with one stage.
        runtime: what placed runs share; None likewise.
        engine: runs steps over the stages; None likewise.
        sharing: the groups that gradients are summed over; None before the first step.
        seeding: with one stage, seeds its units as several stages would, and compiles them; may
            be None.
        is_last_batch: whether this rank has no batch after the one of the step; the ranks of a
            tensor group must agree before one of them leaves the loop.
        seed: where the random streams of units begin, equal on all ranks.
    """

    def __init__(
        self, module: nn.Module, config: SMPConfig, groups: Groups, device: torch.device,
        backend: str,
    ) -> None:  # fmt: skip
        """Takes the model as it is.

        Args:
            module: the model, whole on every rank.
            config: the configuration.
            groups: the process groups.
            device: this rank's device.
            backend: of groups that carry tensors, "nccl" or "gloo".
        """
        self.module = module
        self.config = config
        self.groups = groups
        self.device = device
        self.partition: Partition | None = None
        self.runtime: Runtime | None = None
        self.engine: PipelineEngine | None = None
        self.sharing: SharingGroups | None = None
        self.seeding: SeededUnits | None = None
        self.seed = 0
        self.is_last_batch = False
        self.tensor_group = TensorGroup(groups)
        ranks, control = groups.batch_sharers(config.prescaled_batch)
        self.same_batch = SameBatch(control, ranks)
        self._backend = backend
        self._ownership: Ownership | None = None

    @property
    def is_split(self) -> bool:
        """Whether this rank holds one of several stages."""
        return self.engine is not None

    @property
    def holds_part(self) -> bool:
        """Whether state dicts must be gathered: this rank holds part of the model only."""
        return self.is_split or self.ownership.tensor.is_active

    @property
    def is_placed(self) -> bool:
        """Whether it is known which rank holds what."""
        return self._ownership is not None

    @property
    def ownership(self) -> Ownership:
        """Which stage holds which parameter; before the split, every rank all of them."""
        return Ownership.whole(self.module) if self._ownership is None else self._ownership

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank loads."""
        return self.groups.data_rank(self.config.prescaled_batch)

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the model's gradients together; None if this one holds them all."""
        groups = self.groups
        if self.ownership.tensor.is_active:
            return groups.mp
        return groups.pp if groups.pp_size > 1 else None

    @property
    def position(self) -> str:
        """Where in a step this rank is, in words; empty outside of steps."""
        return "" if self.engine is None else self.engine.position

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters that are real on this rank, in the module's order."""
        return self.ownership.local_parameters()

    # ---- the first step -----------------------------------------------------------------------

    def ensure_ready(
        self, call: Callable[[nn.Module, Any], Any], batch: Any, *,
        optimizers: Sequence[Any] = (), manual: Mapping[str, int] | None = None,
        say: Callable[[str], None] = _log.info,
    ) -> None:  # fmt: skip
        """At the first step: splits the model over the stages. Collective over the world.

        Args:
            call: ``call(copy, batch)`` runs the user's step for one microbatch on a copy.
            batch: one microbatch.
            optimizers: drop what they keep for parameters that leave this rank.
            manual: stages by module name, beside those given by `smp.partition` and
                `smp.set_partition`; used with ``auto_partition`` off.
            say: shows the report of the split.

        Raises:
            PartitionError: the ranks built different models, or there is nothing to divide.
        """
        if self.sharing is not None and self._ownership is not None:
            return
        if self.groups.pp_size > 1 and self._ownership is None:
            partition = self.partition  # of a model that was made whole again
            if partition is None:
                partition = self.tensor_group.agree_on_partition(self._plan(call, batch, manual))
                say(report(partition, self.module))
            self.install(partition, optimizers)
            self.sync_replicas()
        if self._ownership is None:
            self._ownership = Ownership.whole(self.module)
            if self.config.reproducible or self.config.compile:
                self.seeding = SeededUnits(
                    self.module, self.device, seeds=self.config.reproducible,
                    compiler=self._compiler(),
                )  # fmt: skip
                self.seeding.install()
        self.sharing = self._make_sharing()

    def _plan(self, call: Any, batch: Any, manual: Mapping[str, int] | None) -> Partition:
        config, groups = self.config, self.groups
        if not config.auto_partition:
            marked = marked_stages(self.module, find_atoms(self.module), config.default_partition)
            manual = {**marked, **(manual or {})}
        return plan_model(
            self.module, call, batch, groups.pp_size,
            Control(groups.topology.group("pp", groups.rank), groups.control),
            memory_weight=config.partition_memory_weight,
            tied_parameters=config.tied_parameters,
            default_partition=config.default_partition,
            manual=None if manual is None else dict(manual),
            virtual_stages=config.virtual_pipeline_degree,
            policy=config.partition_policy,
            skip_tracing=config.skip_tracing, device=self.device,
        )  # fmt: skip

    def install(self, partition: Partition, optimizers: Sequence[Any] = ()) -> None:
        """Keeps this rank's stage of the model, and makes the engine. Collective over the world."""
        groups = self.groups
        ranks = groups.topology.group("pp", groups.rank)
        self.partition = partition
        self.runtime = Runtime(groups.pp_rank, groups.pp_size, self.device)
        self._ownership = install_units(self.module, partition, self.runtime, self._compiler())
        place_weights(self.module, self._ownership, self.runtime, list(optimizers))
        file = self.config.schedule_file
        self.engine = PipelineEngine(
            self.runtime,
            self._channels(),
            Control(ranks, groups.control),
            pipeline=self.config.pipeline,
            active_microbatches=self.config.active_microbatches,
            table=None if file is None else read_schedule(file),
            activation_limit=self.config.activation_limit_mb,
            costs=self._unit_costs(partition),
        )

    def reassign(
        self, partition: Partition, ownership: Ownership, optimizers: Sequence[Any] = ()
    ) -> None:
        """Units have moved, with all that they hold. Collective over the world.

        Args:
            partition: where they are now.
            ownership: the same, as who holds what.
            optimizers: drop what they keep for parameters that are elsewhere.
        """
        assert self.runtime is not None
        assert self.engine is not None
        self.partition, self._ownership = partition, ownership
        reassign_units(self.module, partition, ownership, self.runtime)
        place_weights(self.module, ownership, self.runtime, list(optimizers))
        self.engine.forget(self._unit_costs(partition))
        self.sharing = self._make_sharing()

    def _compiler(self) -> UnitCompiler | None:
        config = self.config
        return UnitCompiler(config.compile_backend) if config.compile else None

    def _unit_costs(self, partition: Partition) -> dict[int, AtomCost]:
        assert self.runtime is not None
        return {unit.index: partition.costs[unit.name] for unit in self.runtime.units}

    def _channels(self) -> Channels:
        """What stages send each other in steps. Collective over the world."""
        groups = self.groups
        ranks = groups.topology.group("pp", groups.rank)
        if self._backend == "nccl":
            return Channels(ranks, groups.pp, self.device, make_directions(groups))
        return Channels(ranks, groups.messages("pp"), self.device)

    def renew_channels(self) -> None:
        """Takes the present groups for messages between the stages. Collective over the world."""
        if self.engine is not None:
            self.engine.use(self._channels())

    def _make_sharing(self) -> SharingGroups:
        """The groups that gradients are summed over. Collective over the world."""
        assert self._ownership is not None
        topology = self.groups.topology
        stage_ranks = [
            [r for r in range(topology.size) if topology.pp_rank(r) == stage]
            for stage in range(topology.pp_size)
        ]

        def make_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            # Across stages a rank must not wait for a reduction before it starts the next.
            is_one_stage = len({topology.pp_rank(rank) for rank in ranks}) == 1
            backend = self.groups.bounded_backend if is_one_stage else self._backend
            return self.groups.kept.get("sharing", ranks, backend, self.groups.timeout)

        return SharingGroups(self._ownership, stage_ranks, make_group, topology.tp_rank)

    # ---- replicas -----------------------------------------------------------------------------

    def sync_replicas(self) -> None:
        """Gives every replica the weights and buffers of the first. Collective over dp."""
        if self.groups.dp_size > 1:
            split = list(self.ownership.tensor.shardings)
            sync_tensors(self.module, self.groups, split, sync_each)

    def seed_replica(self, given: int | None = None) -> None:
        """Gives all ranks that hold the same batch one random state. Collective over the world.

        Args:
            given: a seed that the user gave to all ranks alike: each replica gets one of its own
                from it. Without one the replicas' random states stay as they are.
        """
        groups = self.groups
        base = torch.initial_seed() & ((1 << 62) - 1) if given is None else given
        self.seed = broadcast_object(base, 0, groups.world_control)  # type: ignore[assignment]
        if given is not None and self.data_rank > 0:
            seed_everywhere(mix_seed(self.seed, self.data_rank), self.device)
        ranks, control = groups.batch_sharers(self.config.prescaled_batch)
        if len(ranks) > 1:
            state = DrawState(self.device).to_plain()
            shared: Any = broadcast_object(state, ranks[0], control)
            DrawState.from_plain(shared, self.device).restore()

    def reducer(
        self, bucket_cap_mb: float | None = None, comm_hook: CommHook | None = None
    ) -> GradientReducer:
        """A reducer of the gradients of replicas and mirrored parameters.

        All ranks must use it at the same point. The model must be ready.
        """
        assert self.sharing is not None
        size = self.config.bucket_cap_mb if bucket_cap_mb is None else bucket_cap_mb
        return GradientReducer(
            self.ownership, self.sharing, bucket_bytes=int(size * 2**20), comm_hook=comm_hook
        )

    # ---- steps --------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> list[Any]:
        """Runs a step; returns what its bodies returned. Collective over pp, and tp.

        Raises:
            CommunicationError: the ranks of a tensor group run different steps.
        """
        try:
            return self._run(plan)
        except BaseException as error:
            state.calls.tear(error)
            raise

    def _run(self, plan: StepPlan) -> list[Any]:
        tensor = self.ownership.tensor
        if tensor.is_active:
            detail = [plan.specs, f"last batch: {self.is_last_batch}"]
            if self.config.prescaled_batch:
                detail.append(f"random streams: {digest_torch_draws(self.device):08x}")
            self.tensor_group.agree(plan.name, tuple(detail), state.calls.trail)
            rest = plan.seed[2:]  # the second is which share of the data it is
            tensor.tp.streams.begin(plan.seed[0], self.groups.rdp_rank, *rest)
        if self.engine is not None:
            return self.engine.step(plan)
        return run_whole(plan, self.module, self.seeding)

    def meet(self, what: str) -> None:
        """Before a collective outside of steps: the ranks of a tensor group all come to it.

        A rank that is out of data would wait in it while its peers wait for it in a step.
        Collective over tp.

        Raises:
            CommunicationError: others are somewhere else.
        """
        if self.ownership.tensor.is_active:
            self.tensor_group.agree(what, "outside of steps", state.calls.trail)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The numbers of tensors that a step gave, detached, on every rank. Collective over pp."""
        if self.engine is None:
            return [tensor.detach() for tensor in tensors]
        return self.engine.fetch(tensors)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, state dicts of the module may be taken, with placeholders in them."""
        if self.runtime is None:
            yield
            return
        former, self.runtime.gathers_state = self.runtime.gathers_state, True
        try:
            yield
        finally:
            self.runtime.gathers_state = former

    # ---- the end ------------------------------------------------------------------------------

    def leave(self) -> None:
        """Gives the module its own forwards and state dicts back; weights stay where they are."""
        if self.runtime is not None:
            self.runtime.leave_module()
        if self.seeding is not None:
            self.seeding.remove()

    def undo(self) -> None:
        """Takes the split back: every parameter has memory on the host, foreign ones no values."""
        self.leave()
        make_whole(self.module, self.ownership)
        self._ownership = self.runtime = self.engine = self.sharing = self.seeding = None

    def to(self, device: torch.device) -> None:
        """Moves what this rank holds to a device, the host for example."""
        if self.is_split:
            materialize(self.module, self.ownership, device)
        else:
            if self.groups.pp_size == 1:
                realize_module(self.module, device)
            self.module.to(device)
