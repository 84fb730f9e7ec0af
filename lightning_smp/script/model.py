"""`smp.DistributedModel`: the user's model, split over the stages at the first step."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import ConfigError, SMPError
from lightning_smp.placed.structure import map_tensors
from lightning_smp.process_state import state
from lightning_smp.script.half import to_float, to_half
from lightning_smp.script.model_parts import LocalParts
from lightning_smp.script.rebalancing import Rebalancing
from lightning_smp.script.replicas import Replicas
from lightning_smp.script.tensor_parts import TensorParts, replace_modules
from lightning_smp.weights.clip import global_clip
from lightning_smp.weights.ownership import release

__all__ = ["DistributedModel"]

_log = logging.getLogger(__name__)


class DistributedModel(LocalParts, TensorParts, Rebalancing, nn.Module):  # type: ignore[misc]
    """The user's model over the ranks of the job; one per process.

    With one stage the model is placed at once: it moves to this rank's device, and every replica
    gets the weights and buffers of the first. With several that happens in the first step.
    From then on torch's ``clip_grad_norm_`` and ``get_total_norm`` give the norm over all stages
    when all ranks call them with the model's parameters or gradients.

    Names of parameters carry the prefix ``module.``, as in any wrapper; keys of state dicts do not.

    Attributes:
        module: the user's module.
        deployment: which part of it is where, and what runs it.
        replicas: how the gradients of replicas become one.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: Literal["cpu", "gpu"] = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        """Wraps a module. Collective over the world.

        Args:
            module: the model, built alike on every rank.
            trace_device: accepted; the split is planned on tensors without storage, on no device.
            trace_execution_times: accepted with a notice; times come from operation counts, so
                that all ranks and runs find the same split.
            overlapping_allreduce: reduce gradients over replicas while the backward still runs;
                False: at its end.
            backward_passes_per_step: steps with a backward until gradients are reduced.
            average_grads_across_microbatches: gradients are means over the microbatches; False:
                sums, for losses that are sums.
            bucket_cap_mb: MiB of gradients that are reduced together.
            trace_memory_usage: accepted with a notice; memory comes from shapes.
            broadcast_buffers: give all replicas the first one's buffers before each training step.
            gradient_as_bucket_view: accepted; reduced gradients are views of buckets in any case.
            find_unused_parameters: accepted; parameters without gradient need no search.

        Raises:
            SMPError: `smp.init` was not called, or there is a distributed model already.
            ConfigError: an argument out of its range.
        """
        super().__init__()
        _check_place(module)
        _check_arguments(trace_device, backward_passes_per_step, bucket_cap_mb)
        _notice_tracing(trace_execution_times, trace_memory_usage)
        del gradient_as_bucket_view, find_unused_parameters
        config = state.cfg
        assert config is not None
        if config.fp16:
            module = module.half()
        self.module = replace_modules(module, config)
        _offer_original_forwards(self.module)
        self.deployment = Deployment(self.module, config, state.groups, state.device, state.backend)
        self.replicas = Replicas(
            self.deployment,
            overlapping=overlapping_allreduce,
            passes=backward_passes_per_step,
            averages=average_grads_across_microbatches,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
        )
        self.backwards: list[Callable[[Any, Any], None]] = []
        self._partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._steps_done = 0
        self._norms = ExitStack()
        weakref.finalize(self, self._norms.close)
        self._waiting_loads: list[Callable[[], None]] = []
        if config.rebalance_after_steps:
            self.rebalance(config.rebalance_after_steps)
        state.model = self
        if self.deployment.groups.pp_size == 1:
            self.deployment.to(state.device)
            self.deployment.sync_replicas()
            self.replicas.watch()

    # ---- forward and backward -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with several stages only in a function decorated with `smp.step`.

        Raises:
            SMPError: with several stages, outside of a step.
        """
        if state.cfg is not None and state.cfg.fp16:
            args, kwargs = map_tensors((args, kwargs), to_half)
            return map_tensors(self._forward(args, kwargs), to_float)
        return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if not state.in_step:
            if state.groups.pp_size > 1:
                raise SMPError(_outside_of_step("forward", state.groups.pp_size))
            self._get_ready()
        if state.in_step:
            return self.module(*args, **kwargs)
        outputs = self.module(*args, **kwargs)
        self.replicas.watch_outputs(outputs)
        return outputs

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """The backward of tensors that the model's output went into.

        In a step it is noted, and runs when the schedule says so; gradients are divided by the
        number of microbatches unless ``average_grads_across_microbatches`` is False. What the step
        does to the tensors afterwards, in place too, does not matter.

        Args:
            tensors: one tensor or several.
            grad_tensors: their gradients; may be left out for tensors of one element.

        Raises:
            SMPError: with several stages, outside of a step.
        """
        if state.tracing:
            return
        if self.backwards:
            self.backwards[-1](tensors, grad_tensors)
            return
        if state.groups.pp_size > 1:
            raise SMPError(_outside_of_step("backward", state.groups.pp_size))
        self.replicas.backward_now(tensors, grad_tensors)

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self.module

    def optimizers(self) -> Iterator[nn.Parameter]:
        """The same as ``parameters()``, as an example of SageMaker's guide spells it."""
        return self.parameters()

    # ---- placement ----------------------------------------------------------------------------

    @property
    def partitioned(self) -> bool:
        """Whether the model has been placed: with several stages, from the first step on."""
        return self.deployment.is_split or self.deployment.groups.pp_size == 1

    def _get_ready(self) -> None:
        """With one stage, what the first step would do, before the first plain forward."""
        self.leave_host()
        self.replicas.announce()
        if self.deployment.sharing is None:
            with state.calls.collective("the placing of the model", "world"):
                self.deployment.seed_replica()
                self.deployment.ensure_ready(_no_call, None)
            self.after_partition()
        if torch.is_grad_enabled():
            self.replicas.begin()

    def load_after_partition(self, load: Callable[[], None]) -> None:
        """Calls ``load`` after the split and before its hooks."""
        self._waiting_loads.append(load)

    def after_partition(self) -> None:
        """Loads what waited for the split, and calls the hooks that did."""
        for load in self._waiting_loads:
            load()
        self._waiting_loads.clear()
        self.replicas.watch()
        self._watch_norms()
        for hook in list(self._partition_hooks.values()):
            hook(self, state.optimizer)

    def _watch_norms(self) -> None:
        """Lets torch's norms be those over all stages."""
        self._norms.close()
        if (group := self.deployment.norm_group) is not None:
            calls, axis = state.calls, state.replica_axis
            deployment = self.deployment  # not this object, which would never be deleted then
            self._norms.enter_context(
                global_clip(
                    lambda: deployment.ownership,
                    group,
                    lambda what: calls.collective(what, axis),
                )
            )

    def count_step(self) -> int:
        """The number of this step, from 0."""
        self._steps_done += 1
        return self._steps_done - 1

    def after_first_step(self) -> None:
        """Calls the hooks that waited for the first step."""
        hooks, self._step_hooks = list(self._step_hooks.values()), OrderedDict()
        for hook in hooks:
            hook(self, state.optimizer)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` once, after the split and before the first forward.

        With one stage that is at the first step or forward as well. If it is over, at once.
        """
        if self.deployment.sharing is not None:
            hook(self, state.optimizer)
        handle = RemovableHandle(self._partition_hooks)
        self._partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` once, after the next step (usually the first)."""
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    @contextmanager
    def traced_by(self, copy: nn.Module) -> Iterator[None]:
        """Lets a copy without numbers stand in for the module, however the user reaches it."""
        original = self.module
        self._modules["module"] = copy
        state.tracing = True
        try:
            yield
        finally:
            state.tracing = False
            self._modules["module"] = original

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """As `nn.Module.to`, but the library chooses the device."""
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            super().to(dtype=dtype)
        if memory_format is not None:
            super().to(memory_format=memory_format)  # type: ignore[call-overload]
        return self

    def cuda(self, device: Any = None) -> DistributedModel:
        """Does nothing: the library places each part itself."""
        del device
        return self

    def cpu(self) -> DistributedModel:
        """Brings the whole model to the host of every rank. Collective over the world.

        A later step splits it again.
        """
        self.gather_whole()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedModel:
        super()._apply(fn, recurse)
        if self.deployment.is_split:  # placeholders may have become real
            release(self.module, self.deployment.ownership)
        return self

    # ---- replicas -----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """A context in which replicas may have different numbers of batches.

        A replica that has no more takes part in the others' reductions with zeros, and leaves with
        the weights of one that trained to the end. Collective over the world: all ranks enter.

        Args:
            divide_by_initial_world_size: gradients stay divided by the number of all replicas;
                False: by the number of those that still have batches.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks when the first replica has no more.

        Raises:
            CommunicationError: ranks of one replica have different numbers of batches.
            UnsupportedError: with `fp16` and several replicas.
        """
        return self.replicas.join(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Lets ``hook(state, bucket)`` reduce each bucket of gradients over the replicas.

        As in torch's DistributedDataParallel; the bucket has the methods of `dist.GradBucket`. The
        hook divides by the number of replicas and of microbatches itself. Use
        ``smp.get_dp_process_group()`` for its collectives.

        Raises:
            UnsupportedError: gradients are not reduced while the backward runs, or a parameter has
                copies on several stages.
            SMPError: there is a hook already.
        """
        self.replicas.register_comm_hook(state, hook)

    _register_comm_hook = register_comm_hook
    """Its first name."""


def _no_call(copy: nn.Module, batch: Any) -> None:
    """With one stage there is nothing to analyse."""


def _check_place(module: nn.Module) -> None:
    if not state.initialized:
        raise SMPError("smp.DistributedModel needs smp.init() first.")
    if state.model is not None:
        raise SMPError(
            "there is a DistributedModel in this process already, and there can be one only. Wrap "
            "several networks in one nn.Module, or delete the other one first."
        )
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"smp.DistributedModel was given a {type(module).__name__}; it wraps an nn.Module."
        )


def _offer_original_forwards(module: nn.Module) -> None:
    """Lets a module's forward call ``super()._orig_forward()``, as SMP's guide tells it to.

    SMP replaced the forward of classes, so that ``super().forward()`` did not end; here it does.
    """
    for kind in {kind for child in module.modules() for kind in type(child).__mro__}:
        own = vars(kind)
        if "forward" in own and "_orig_forward" not in own and issubclass(kind, nn.Module):
            kind._orig_forward = own["forward"]  # type: ignore[attr-defined]


def _check_arguments(trace_device: object, passes: object, bucket_cap_mb: object) -> None:
    if trace_device not in ("cpu", "gpu"):
        raise ConfigError(f'trace_device={trace_device!r}; it must be "cpu" or "gpu".')
    if type(passes) is not int or passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes!r}; it must be an int >= 1.")
    if not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
        raise ConfigError(f"bucket_cap_mb={bucket_cap_mb!r}; it must be a number above 0.")


def _notice_tracing(times: bool, memory: bool) -> None:
    for name, asked in (("trace_execution_times", times), ("trace_memory_usage", memory)):
        if asked:
            _log.warning(
                "%s=True is accepted; the split is planned from shapes and operation counts, so "
                "that it is the same on all ranks and in all runs.", name
            )  # fmt: skip


def _outside_of_step(what: str, stages: int) -> str:
    return (
        f"{what} of the DistributedModel was called outside of a step, with "
        f"pipeline_parallel_degree={stages}. Call it in a function decorated with @smp.step, for "
        "evaluation too; with one stage plain loops work."
    )
