"""Ranks, process groups, launch and collectives of the strategy."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_smp.deploy.agreement import compare_configurations
from lightning_smp.errors import UnsupportedError
from lightning_smp.failure import FailureWatch
from lightning_smp.groups import Groups
from lightning_smp.lightning.base import StrategyState
from lightning_smp.process_state import state
from lightning_smp.reunion import Reunion, Standing, obstacle_after
from lightning_smp.wire import broadcast_object

__all__ = ["Environment"]


class Environment(StrategyState):
    """Who this rank is, and how it talks to the others."""

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas share the data.

        With one replica the user's own samplers stay, so that the batches are those of one device;
        Lightning would shuffle every training loader of a distributed strategy.
        """
        return self._groups is None or self._groups.data_size(self.config.prescaled_batch) > 1

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
    def process_group_backend(self) -> str | None:
        """Backend of the groups that carry tensors."""
        return self._backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks of one replica load the same samples."""
        prescaled = self.config.prescaled_batch
        return {
            "num_replicas": self.groups.data_size(prescaled),
            "rank": self.groups.data_rank(prescaled),
        }

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and the loggers who this rank is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (
            self._import("utilities.rank_zero"), self._import_fabric("utilities.rank_zero")
        ):  # fmt: skip
            module.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        module = self._import("strategies.launchers.subprocess_script")
        self._launcher = module._SubprocessScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def setup_environment(self) -> None:
        """Makes the process groups. Collective over the world."""
        super().setup_environment()  # type: ignore[misc]
        if self.root_device.type == "mps":
            raise UnsupportedError(
                "strategy='smp' on MPS: there are no collectives there; use accelerator='cpu'."
            )
        if self.is_global_zero:
            _show_log()
        self.set_world_ranks()
        if self._backend is None:
            self._backend = _default_backend(self.root_device, self.parallel_devices)
        timeout = timedelta(seconds=self.config.timeout)
        if not dist.is_initialized():
            init = self._import_fabric("utilities.distributed")._init_dist_connection
            init(self.cluster_environment, self._backend, timeout=timeout)
        if self._watch is None:
            self._rejoin()
        if self._groups is None or not self._groups.is_alive:
            topology = self.config.topology(dist.get_world_size())
            self._groups = Groups.build(
                topology, dist.get_rank(), self._backend, timeout, state.kept
            )
            compare_configurations(self.config, self._groups)
        elif self._deployment is not None:
            self._deployment.renew_channels()
        state.start(self.config, self._groups, self.root_device, self._backend)
        if self._watch is None:
            self._watch = FailureWatch(self.global_rank, state.calls, self._groups.topology)
            state.watch = self._watch

    def _rejoin(self) -> None:
        """After an earlier run of this process: the ranks can go on. Collective over the world.

        Raises:
            CommunicationError: they cannot.
        """
        former, torn = state.watch, state.calls.torn
        if former is None:
            return
        former.retire()
        if not state.kept.is_current:
            return  # all groups are new
        account = "ended its last run well"
        if former.error is not None:
            account = f"ended its last run by {former.error}"
        elif torn is not None:
            account = f"has {torn}"
        standing = Standing(
            account, failed=former.error is not None, torn=torn is not None,
            obstacle=None if torn is None else obstacle_after(torn, state.groups, state.backend),
        )  # fmt: skip
        reunion = Reunion(dist.get_rank(), dist.get_world_size(), state.kept)
        reunion.hold(standing, self.config.timeout, former.why_missing(in_run=False))

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one stops; after the run, those of the next one."""
        watch = self._watch or state.watch
        if watch is not None and self._groups is not None:
            where = "" if self._deployment is None else self._deployment.position
            watch.report(exception, self.groups.pp_rank, where)

    def _replace_sigterm_handler(self, trainer: Any) -> None:
        """Lightning's own one broadcasts while the other ranks are in the middle of a step.

        What it broadcasts before each batch goes past the strategy; it becomes a call like others.
        """
        connector = trainer._signal_connector

        def note(signum: int, frame: Any) -> None:
            if not connector.received_sigterm:
                self._launcher.kill(signum)
            connector.received_sigterm = True  # looked at after each batch

        connector._sigterm_notifier_fn = note
        loop = trainer.fit_loop.epoch_loop
        own = getattr(type(loop), "_broadcast_sigterm_tensor", None)
        if own is not None:

            def broadcast() -> None:
                with state.calls.collective("the exchange of signals", "world"):
                    own(loop)

            loop._broadcast_sigterm_tensor = broadcast

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the replicas. Collective over ``group``, by default over dp."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        is_own = group is None
        if is_own:
            self._meet("reduce")
        group = self._replicas(group)
        size = dist.get_world_size(group)
        if size == 1:
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else None
        mean = name in ("mean", "avg")
        op = reduce_op if name is None else getattr(dist.ReduceOp, "SUM" if mean else name.upper())
        reduced = tensor.to(self.root_device).contiguous().clone()
        if mean and not reduced.is_floating_point():
            reduced = reduced.to(torch.get_default_dtype())
        with self._calling("reduce") if is_own else nullcontext():
            dist.all_reduce(reduced, op=op, group=group)
        return reduced.div_(size) if mean else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the world say yes. Collective over the world."""
        self._meet("reduce_boolean_decision")
        count = torch.tensor(int(decision))
        with state.calls.collective("reduce_boolean_decision", "world"):
            dist.all_reduce(count, group=self.groups.world_control)
        return int(count) == dist.get_world_size() if all else int(count) > 0

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gathers from the replicas, [dp, ...]. Collective over ``group``, by default over dp."""
        is_own = group is None
        if is_own:
            self._meet("all_gather")
        module = self._import_fabric("utilities.distributed")
        with self._calling("all_gather") if is_own else nullcontext():
            return module._all_gather_ddp_if_available(
                tensor, group=self._replicas(group), sync_grads=sync_grads
            )

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks. Collective over the world."""
        self._meet("barrier")
        if dist.is_initialized() and self._groups is not None:
            with state.calls.collective("barrier", "world"):
                dist.barrier(group=self.groups.world_control)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of global rank ``src``, sent as plain data. Collective over the world."""
        self._meet("broadcast")
        if self._groups is None or dist.get_world_size() == 1:
            return obj
        with state.calls.collective("broadcast", "world"):
            return broadcast_object(obj, src, self.groups.world_control)

    def _meet(self, what: str) -> None:
        """Notices a rank that is out of data before its tensor group waits for it."""
        if self._deployment is not None and dist.is_initialized():
            self._deployment.meet(what)

    def _calling(self, what: str) -> AbstractContextManager[None]:
        """A call of this stage's replicas."""
        return state.calls.collective(what, "rdp" if self.config.prescaled_batch else "dp")

    def _replicas(self, group: Any) -> Any:
        if group is None or group is dist.group.WORLD:
            return self.groups.data_group(self.config.prescaled_batch)
        return group


def _show_log() -> None:
    """Shows the library's notices as Lightning shows its own, unless the program logs itself."""
    logger = logging.getLogger("lightning_smp")
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def _default_backend(device: torch.device, devices: Any) -> str:
    """NCCL needs a GPU for each process; gloo serves CPUs and processes that share a GPU."""
    if device.type == "cuda" and len(set(devices)) == len(devices):
        return "nccl"
    return "gloo"
