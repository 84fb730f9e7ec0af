"""How the gradients of replicas become one: hooks, accumulation, uneven data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import SMPError, UnsupportedError
from lightning_smp.placed.structure import iter_tensors
from lightning_smp.process_state import state
from lightning_smp.script.joining import Joining
from lightning_smp.weights.gradients import GradientReducer

__all__ = ["Replicas"]


class Replicas:
    """Reduces the gradients of a model over its replicas and mirrored parameters.

    Gradients are a plain mean over the replicas. What was in ``.grad`` before, reduced, stays as it
    is: the mean of equal numbers is that number. Copies of a mirrored parameter are summed, and so
    is what a tensor group's samples give a split one; what their ``.grad`` held before is kept
    apart meanwhile.

    Args:
        deployment: the model over the ranks.
        overlapping: reduce while the backward runs.
        passes: steps with a backward until gradients are reduced.
        averages: whether gradients are means over microbatches.
        bucket_cap_mb: MiB of a bucket.
        broadcast_buffers: whether replicas get the first one's buffers before training steps.
    """

    def __init__(
        self, deployment: Deployment, *, overlapping: bool, passes: int, averages: bool,
        bucket_cap_mb: float, broadcast_buffers: bool,
    ) -> None:  # fmt: skip
        self.deployment = deployment
        self.overlapping = overlapping
        self.passes = passes
        self.averages = averages
        self.bucket_cap_mb = bucket_cap_mb
        self.broadcast_buffers = broadcast_buffers
        self.comm_hook: Callable[[Any], Any] | None = None
        self.joining: Joining | None = None
        self._passes_done = 0
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._reducer: GradientReducer | None = None
        self._is_queued = False
        self._watched: list[Any] = []

    # ---- steps --------------------------------------------------------------------------------

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients wait for further steps before they are reduced."""
        return self._passes_done > 0

    def seed(self, microbatches: int) -> float:
        """The gradient of a microbatch's loss."""
        factor = 1.0 / microbatches if self.averages and self.comm_hook is None else 1.0
        return factor if state.optimizer is None else factor * state.optimizer.loss_scale

    def announce(self) -> None:
        """In `join`, before all else of a training step. Collective over the world."""
        if self.joining is not None and torch.is_grad_enabled():
            self.joining.announce_step()

    def begin(self) -> None:
        """A training step begins. Collective over the world."""
        if self.broadcast_buffers and self.deployment.module.training:
            self._share_buffers()
        if self._passes_done == 0 and not self._kept:
            self._keep_mirrored()

    def on_final(self) -> Callable[[list[nn.Parameter]], None] | None:
        """What the engine calls with final gradients; None where they are reduced at the end."""
        is_last = self._passes_done + 1 == self.passes
        return self._ready if self.overlapping and is_last and self.joining is None else None

    def end(self, *, had_backward: bool) -> None:
        """A step is over: reduces, if enough have accumulated. Collective over the world."""
        if had_backward:
            self._passes_done += 1
            if self._passes_done == self.passes:
                self.reduce()
        if self._passes_done == 0:
            self._restore_mirrored()

    def abort(self) -> None:
        """A step has failed: the next one starts anew."""
        self._reducer, self._passes_done, self._is_queued = None, 0, False
        self._restore_mirrored()

    def reduce(self) -> None:
        """Reduces what is left, and waits. Collective over the world."""
        self._passes_done = 0
        if self.joining is not None:
            self.joining.announce_reduction()
        self._finish()

    def reduce_as_shadow(self) -> None:
        """Takes part in a reduction that the active ranks have announced, with what there is."""
        self._finish()

    def _finish(self) -> None:
        self._ready([])
        assert self._reducer is not None
        reducer, self._reducer = self._reducer, None
        if reducer.communicates:
            with state.calls.collective("the reduction of gradients", "dp"):
                reducer.finish()

    def _ready(self, parameters: list[nn.Parameter]) -> None:
        if self._reducer is None:
            self._reducer = self.deployment.reducer(self.bucket_cap_mb, self.comm_hook)
            if self._reducer.communicates:
                self._reducer.start(None, share=self._factor())
        if self._reducer.communicates:
            for parameter in parameters:
                self._reducer.ready(parameter)

    def _factor(self) -> float:
        if self.comm_hook is not None:
            return 1.0
        replicas = self.deployment.groups.dp_size
        return 1.0 / (replicas if self.joining is None else self.joining.divisor)

    # ---- mirrored parameters ------------------------------------------------------------------

    def _keep_mirrored(self) -> None:
        ownership = self.deployment.ownership
        for parameter in ownership.parameters():
            gradient = parameter.grad
            copies = len(ownership.stages_of(parameter)) > 1
            if gradient is not None and (copies or ownership.tensor.sees_group(parameter)):
                self._kept.append((parameter, gradient))
                parameter.grad = None

    def _restore_mirrored(self) -> None:
        for parameter, gradient in self._kept:
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
        self._kept.clear()

    # ---- buffers ------------------------------------------------------------------------------

    def _share_buffers(self) -> None:
        if self.deployment.groups.dp_size == 1:
            return
        active: Collection[int] = range(self.deployment.groups.world_size)
        if self.joining is not None:
            self.joining.announce_buffers()
            active = self.joining.active
        self.share_buffers(active)

    def share_buffers(self, active: Collection[int]) -> None:
        """Gives all replicas the buffers of the first one in ``active``. Collective over dp."""
        ownership, here = self.deployment.ownership, self.deployment.groups.pp_rank
        self._share(
            [
                (name, buffer)
                for name, buffer in self.deployment.module.named_buffers()
                if here in (ownership.stages_of_name(name) or (here,))
            ],
            active,
        )

    def share_weights(self, active: Collection[int]) -> None:
        """Gives all replicas the parameters and buffers of one. Collective over dp."""
        ownership = self.deployment.ownership
        local = self.deployment.local_parameters()
        self._share([(ownership.name_of(p), p) for p in local], active)
        self.share_buffers(active)

    def _share(self, named: Sequence[tuple[str, Tensor]], active: Collection[int]) -> None:
        """Tensors that are split over a tensor group are equal on the ranks of rdp only."""
        groups = self.deployment.groups
        split = set(self.deployment.ownership.tensor.shardings)
        whole = [tensor for name, tensor in named if name not in split]
        parts = [tensor for name, tensor in named if name in split]
        for axis, tensors in (("dp", whole), ("rdp", parts)):
            members = groups.topology.group(axis, groups.rank)  # type: ignore[arg-type]
            if len(members) > 1:
                source = next(rank for rank in members if rank in active)
                with state.calls.collective("the broadcast of buffers", axis):  # type: ignore[arg-type]
                    _broadcast(tensors, source, getattr(groups, axis))

    def backward_now(self, tensors: Any, grad_tensors: Any) -> None:
        """A backward outside of steps, with one stage."""
        scale = 1.0 if state.optimizer is None else state.optimizer.scale_backward()
        if scale != 1.0:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            tensors = [tensor * scale for tensor in tensors]
        torch.autograd.backward(tensors, grad_tensors)

    # ---- plain loops --------------------------------------------------------------------------

    def watch(self) -> None:
        """With one stage and several replicas: reduces in plain backwards, outside of steps."""
        groups = self.deployment.groups
        if groups.pp_size > 1 or groups.dp_size == 1 or self._watched:
            return
        self._watched = [
            parameter.register_post_accumulate_grad_hook(self._plain_ready)
            for parameter in self.deployment.module.parameters()
            if parameter.requires_grad
        ]

    def watch_outputs(self, outputs: Any) -> None:
        """Lets the backward of a plain forward's outputs tell when it begins."""
        if not self._watched:
            return
        for tensor in iter_tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._plain_begin)

    def _plain_begin(self, gradient: Tensor) -> None:
        if not self._is_queued and not state.in_step:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._plain_end)

    def _plain_ready(self, parameter: nn.Parameter) -> None:
        if state.in_step:
            return
        self._plain_begin(parameter)
        if self.on_final() is not None:
            self._ready([parameter])

    def _plain_end(self) -> None:
        self._is_queued = False
        self.end(had_backward=True)

    # ---- hooks and uneven data ----------------------------------------------------------------

    def register_comm_hook(self, given: object, hook: Callable[[Any, Any], Any]) -> None:
        """Lets a hook reduce the buckets."""
        if not self.overlapping:
            raise UnsupportedError(
                "register_comm_hook with overlapping_allreduce=False: the hook works on the "
                "buckets of the overlapped reduction. Use DistributedModel(..., "
                "overlapping_allreduce=True)."
            )
        if self.comm_hook is not None:
            raise SMPError("register_comm_hook was called twice; a model has one hook.")
        self.comm_hook = lambda bucket: hook(given, bucket)

    @contextmanager
    def join(
        self, *, divide_by_initial_world_size: bool, enable: bool, throw_on_early_termination: bool
    ) -> Iterator[None]:
        """See `DistributedModel.join`."""
        if not enable or self.deployment.groups.dp_size == 1:
            yield
            return
        if self.deployment.config.fp16:
            raise UnsupportedError(
                "model.join() with fp16=True: replicas that end early would lose their float32 "
                "copies of the weights. Give all replicas the same number of batches, with "
                "drop_last=True."
            )
        self.joining = joining = Joining(
            self, initial=divide_by_initial_world_size, throws=throw_on_early_termination
        )
        try:
            yield
            joining.shadow()
        finally:
            self.joining = None


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Gives a group the tensors of one rank, those of one dtype together. Collective."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    for _, alike in sorted(found.items(), key=lambda item: str(item[0])):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        dist.broadcast(flat, source, group=group)
        parts = flat.split([tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
