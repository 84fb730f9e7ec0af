"""Sums gradients over the ranks that hold a parameter, in buckets, while the backward still runs.

What one device would have computed is the mean over all samples. Replica r (all ranks with the
same dp_rank) has accumulated g_r, the mean over *its* samples; with weights w_r (its number of
samples) the result is sum_r (w_r / W) g_r, W = sum_r w_r. A mirrored parameter gets only a part of
g_r on each stage that holds it, so the same all-reduce also sums over those stages.

Note: one order for everybody. Buckets are made from the parameters that *all* ranks know, in one
global order, and each rank issues those it takes part in by that order. Members of one group
therefore meet in the same sequence; ranks that belong to several groups cannot wait in a circle.

Note: tensor parallelism. Split parameters, and whole ones in a distributed module's work, already
have the gradient of the tensor group's samples, so only the ranks with the same tp_rank sum them.
Without a peer of that kind they are scaled in place.

Note: gradients move, once. Launching a bucket copies its gradients into one flat buffer, scaled by
w_r / W beforehand (half precision cannot overflow in the sum), and hands out views of it as the new
gradients, so that the old ones are freed bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smp.errors import ScheduleError, UnsupportedError
from lightning_smp.native.kernels.buckets import flatten_into
from lightning_smp.weights.comm_hook import CommHook, HookBucket
from lightning_smp.weights.ownership import Ownership
from lightning_smp.weights.sharing import Sharers, SharingGroups, WeightAgreement, sharers_of

__all__ = ["GradientReducer", "GradientStore"]

_DEFAULT_BUCKET_BYTES: Final = 25 * 2**20


def _grad_of(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def _set_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient


@dataclass(frozen=True)
class GradientStore:
    """Where gradients are read from and written to: `p.grad`, or a stash."""

    get: Callable[[nn.Parameter], Tensor | None] = _grad_of
    set: Callable[[nn.Parameter, Tensor], None] = _set_grad


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together; `flat` lives from launch to finish."""

    sharers: Sharers
    group: dist.ProcessGroup
    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    pending: set[nn.Parameter] = field(default_factory=set)
    missing: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None
    work: dist.Work | None = None
    future: torch.futures.Future[Any] | None = None


class GradientReducer:
    """Reduces the gradients of one optimizer step over replicas and mirrored copies.

    Use per step: `start`, then `ready` for each parameter whose gradient is final (in any order),
    then `finish`. Until `finish` returns, the gradients of parameters marked ready belong to the
    reducer. All members end with bitwise equal gradients. Without replicas and mirrored parameters
    nothing is communicated or copied.

    Collective over the sharers of each parameter: all ranks must run the same steps; the order of
    `ready` calls may differ.
    """

    def __init__(
        self,
        ownership: Ownership,
        groups: SharingGroups,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        store: GradientStore | None = None,
        bucket_bytes: int = _DEFAULT_BUCKET_BYTES,
        comm_hook: CommHook | None = None,
    ) -> None:
        """Makes the buckets; make a new reducer when parameters are frozen or thawed.

        Args:
            ownership: which stages hold which parameter.
            groups: from the same ownership.
            parameters: in an order that all ranks share, foreign ones included; by default all of
                the module. Those that need no gradient are left out. Buckets are filled from the
                end of this order, where backward begins.
            store: where gradients live, `p.grad` by default.
            bucket_bytes: a bucket is closed when it has reached this size.
            comm_hook: reduces each bucket over the replicas instead of an all-reduce.

        Raises:
            UnsupportedError: a hook, and a parameter with copies on several stages or parts on
                several tensor-parallel ranks.
        """
        self._ownership = ownership
        self._groups = groups
        self._store = store or GradientStore()
        everyone = ownership.parameters() if parameters is None else parameters
        trainable = [parameter for parameter in everyone if parameter.requires_grad]
        self._buckets = _make_buckets(trainable, ownership, groups, bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        # Nobody else holds these, but their gradients count for the whole tensor group.
        self._alone = [
            parameter
            for parameter in trainable
            if ownership.tensor.sees_group(parameter)
            and ownership.is_local(parameter)
            and parameter not in self._bucket_of
        ]
        self._next = 0
        self._active = False
        self._agreement: WeightAgreement | None = None
        self._share = 1.0
        self._comm_hook = comm_hook
        if comm_hook is not None:
            self._refuse_mirrored()

    @property
    def communicates(self) -> bool:
        """Whether this rank exchanges or scales any gradient."""
        return bool(self._buckets or self._alone)

    @property
    def is_active(self) -> bool:
        """Whether a step was started and not finished."""
        return self._active

    def start(self, weight: float | None, *, share: float = 1.0) -> None:
        """Begin a step in which this replica's gradients count with `weight` (its samples).

        None says that the gradients are this replica's share of the mean already (or of a sum
        over accumulated batches, each weighted by its own `WeightAgreement`): a plain sum follows,
        of ``share`` times the gradients.
        All ranks of a replica give the same weight, and all replicas a number or all None.

        Collective over the replicas; does not block.

        Raises:
            ScheduleError: the step before was not finished.
        """
        if self._active:
            raise ScheduleError("A gradient reduction was started before the last was finished.")
        self._active, self._next, self._agreement, self._share = True, 0, None, share
        for bucket in self._buckets:
            bucket.pending = set(bucket.parameters)
        dp_group = self._groups.dp_group
        if self.communicates and dp_group is not None and weight is not None:
            device = [*self._bucket_of, *self._alone][0].device
            size = len(self._groups.dp_ranks)
            self._agreement = WeightAgreement(weight, dp_group, size, device)

    def ready(self, parameter: nn.Parameter) -> None:
        """Mark a gradient as final; launches each bucket that is complete and whose turn it is.

        Raises:
            ScheduleError: no step is active, or the parameter was marked before in this step.
            UnsupportedError: a gradient of a launched bucket is sparse.
        """
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        if not self._active or parameter not in bucket.pending:
            raise ScheduleError(
                f"The gradient of {self._ownership.name_of(parameter)!r} was marked final "
                f"{'twice in one step' if self._active else 'outside a step'}."
            )
        bucket.pending.remove(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._launch(self._buckets[self._next])

    def finish(self) -> None:
        """Launch what is left, wait for all, and write the reduced gradients back.

        A parameter without a gradient here but with one on another member receives the reduced
        gradient; without one anywhere it stays without.

        Raises:
            ScheduleError: no step is active.
            UnsupportedError: a gradient is sparse.
        """
        if not self._active:
            raise ScheduleError("finish() was called without start().")
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        presence = self._exchange_presence()
        self._scale_alone()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.future is not None:
                _take_result(bucket)
            self._deliver(bucket, presence)
            bucket.flat = bucket.work = bucket.future = None
            bucket.missing.clear()
        self._active = False

    @torch.no_grad()
    def divide_reduced(self) -> None:
        """Makes reduced gradients parts of a sum again, which the next `finish` restores.

        For gradients that stay while others are added to them. Without communication.
        """
        group_factor = self._ownership.tensor.group_factor
        members = [
            (p, dist.get_world_size(bucket.group) * (group_factor if bucket.sharers[1] else 1.0))
            for bucket in self._buckets
            for p in bucket.parameters
        ]
        for parameter, count in [*members, *((p, group_factor) for p in self._alone)]:
            gradient = self._dense_gradient(parameter)
            if gradient is not None:
                gradient.div_(count)

    def _launch(self, bucket: _Bucket) -> None:
        self._next += 1
        gradients = [self._dense_gradient(parameter) for parameter in bucket.parameters]
        parts = [
            torch.zeros_like(p, memory_format=torch.contiguous_format) if g is None else g
            for p, g in zip(bucket.parameters, gradients, strict=True)
        ]
        flat = _flattened(parts, self._factor(bucket.sharers[1]))
        views = flat.split([part.numel() for part in parts])
        for parameter, gradient, view in zip(bucket.parameters, gradients, views, strict=True):
            shaped = view.view(parameter.shape)
            if gradient is None:
                bucket.missing[parameter] = shaped
            else:
                self._store.set(parameter, shaped)
        bucket.flat = flat
        if self._comm_hook is None:
            bucket.work = self._groups.all_reduce(bucket.sharers, flat)
            return
        seen = HookBucket(
            self._next - 1, flat, bucket.parameters, is_last=self._next == len(self._buckets)
        )
        bucket.future = self._comm_hook(seen)

    def _refuse_mirrored(self) -> None:
        if self._ownership.tensor.is_active:
            raise UnsupportedError(
                "register_comm_hook: gradients of distributed modules are reduced over other ranks "
                "than those of the rest, which a hook over the replicas does not do. Use "
                "tensor_parallel_degree=1, or no hook."
            )
        for bucket in self._buckets:
            if len(bucket.sharers[0]) > 1:
                name = self._ownership.name_of(bucket.parameters[0])
                raise UnsupportedError(
                    f"register_comm_hook: the parameter {name!r} has copies on stages "
                    f"{bucket.sharers[0]}, whose gradients must be summed, which a hook over the "
                    'replicas does not do. Use tied_parameters="together".'
                )

    def _factor(self, sees_group: bool) -> float:
        """What this rank's gradients count with in the sum."""
        share = self._share if self._agreement is None else self._agreement.share()
        return share * self._ownership.tensor.group_factor if sees_group else share

    @torch.no_grad()
    def _scale_alone(self) -> None:
        factor = self._factor(True) if self._alone else 1.0
        for parameter in self._alone:
            gradient = self._dense_gradient(parameter)
            if gradient is None:
                continue
            if factor == 0.0:
                gradient.zero_()  # as `flatten_into` does
            elif factor != 1.0:
                gradient.mul_(factor)

    def _dense_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self._store.get(parameter)
        if gradient is not None and gradient.layout is not torch.strided:
            name = self._ownership.name_of(parameter)
            raise UnsupportedError(
                f"The gradient of {name!r} is {gradient.layout}; only dense gradients are summed "
                f"over replicas and stages. Build the embedding with sparse=False."
            )
        return gradient

    def _exchange_presence(self) -> dict[Sharers, tuple[Tensor, dist.Work | None]]:
        """Start, per group, the agreement on which parameters have a gradient on any member."""
        presence: dict[Sharers, tuple[Tensor, dist.Work | None]] = {}
        for sharers, buckets in _by_sharers(self._buckets).items():
            flags = [p not in bucket.missing for bucket in buckets for p in bucket.parameters]
            device = buckets[0].parameters[0].device
            tensor = torch.tensor(flags, dtype=torch.uint8, device=device)
            work = self._groups.all_reduce(sharers, tensor, dist.ReduceOp.MAX)
            presence[sharers] = (tensor, work)
        return presence

    def _deliver(
        self, bucket: _Bucket, presence: dict[Sharers, tuple[Tensor, dist.Work | None]]
    ) -> None:
        flags, work = presence[bucket.sharers]
        if work is not None:
            work.wait()
        if bucket.missing:  # only here is the answer read: elsewhere the device need not be awaited
            members = (p for b in _by_sharers(self._buckets)[bucket.sharers] for p in b.parameters)
            for parameter, present in zip(members, flags.tolist(), strict=True):
                if present and parameter in bucket.missing:
                    self._store.set(parameter, bucket.missing[parameter])
        for parameter in bucket.parameters:
            gradient = self._store.get(parameter)
            if gradient is not None and gradient.stride() != parameter.stride():
                # Travelled in C order, the one layout that all members agree on; kept as the
                # parameter is laid out (channels_last), which optimizers are fast with.
                self._store.set(parameter, torch.empty_like(parameter).copy_(gradient))


@torch.no_grad()
def _flattened(parts: Sequence[Tensor], factor: float) -> Tensor:
    """One flat buffer of ``factor`` times the gradients; zeros if it is 0.

    The mean over no samples is NaN, and 0 * NaN would spread.
    """
    flat = parts[0].new_empty(sum(part.numel() for part in parts))
    detached = [part.detach() for part in parts]
    if flat.is_complex():
        whole, numbers = torch.view_as_real(flat), map(torch.view_as_real, detached)
        flatten_into(whole.view(-1), [part.reshape(-1) for part in numbers], scale=factor)
    else:
        flatten_into(flat, detached, scale=factor)
    return flat


@torch.no_grad()
def _take_result(bucket: _Bucket) -> None:
    """Puts what a communication hook gave into the bucket, whose views are the gradients."""
    assert bucket.flat is not None
    assert bucket.future is not None
    given = bucket.future.wait()
    result = given[0] if isinstance(given, (list, tuple)) else given
    if result.data_ptr() != bucket.flat.data_ptr():
        bucket.flat.copy_(result.view_as(bucket.flat))


def _make_buckets(
    parameters: Sequence[nn.Parameter],
    ownership: Ownership,
    groups: SharingGroups,
    bucket_bytes: int,
) -> list[_Bucket]:
    """Return this rank's buckets in the global order: by the place of their last parameter."""
    is_open: dict[tuple[Sharers, torch.dtype, torch.device], _Bucket] = {}
    closed: list[_Bucket] = []
    place = {parameter: index for index, parameter in enumerate(reversed(parameters))}
    for parameter in place:
        sharers = sharers_of(parameter, ownership)
        group = groups[sharers] if ownership.is_local(parameter) else None
        if group is None:
            continue
        key = (sharers, parameter.dtype, parameter.device)
        bucket = is_open.setdefault(key, _Bucket(sharers, group))
        bucket.parameters.append(parameter)
        bucket.size_bytes += ownership.tensor.mean_numel(parameter) * parameter.element_size()
        if bucket.size_bytes >= bucket_bytes:
            closed.append(is_open.pop(key))
    buckets = closed + list(is_open.values())
    return sorted(buckets, key=lambda bucket: place[bucket.parameters[-1]])


def _by_sharers(buckets: Iterable[_Bucket]) -> dict[Sharers, list[_Bucket]]:
    """Return the buckets of each group, groups in the order that all ranks share."""
    found: dict[Sharers, list[_Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.sharers, []).append(bucket)
    return dict(sorted(found.items()))
