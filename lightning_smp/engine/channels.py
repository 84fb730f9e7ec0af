"""Tensors between the stages: one ordered stream per ordered pair of ranks.

Sends never block. Receives are posted in the sender's order, which both sides know, ahead of need
where that is safe (`lightning_smp.engine.posting` says when).

Note: one group a direction. NCCL runs what is posted on one communicator one after the other, so a
receive that is posted ahead of need would hold up a send to the same rank, for ever if that send is
what the other side waits for. So each direction has a communicator, and a stream, of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_smp.groups import Groups
from lightning_smp.kept_groups import MESSAGES
from lightning_smp.program import TensorSpec
from lightning_smp.timeline.clock import StepClock

__all__ = ["Channels", "Directions", "make_directions"]

Directions = dict[tuple[int, int], dist.ProcessGroup]

_MAX_BLOCKS = 4
"""Thread blocks of a communicator between two stages."""

_AHEAD = 4
"""Actions by which receives are posted earlier, at least, where a posted one holds up nobody."""

_MAX_UNFINISHED = 256
"""Sends whose buffers are kept before the oldest is waited for."""


_CPU = torch.device("cpu")
_CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
     torch.uint8}
)  # fmt: skip
"""Types that every backend can send."""

_Ways = dict[int, tuple[dist.ProcessGroup, int]]
"""Stage -> the group to use, and the stage's rank in it."""


class Channels:
    """The point-to-point traffic of one rank.

    Args:
        ranks: global rank of each stage.
        group: a group of these ranks.
        device: the run's device; where the backend cannot reach it (gloo and CUDA), tensors are
            staged through host memory.
        directions: for NCCL, the group of each (source stage, target stage) that this rank is in,
            from `make_directions`.

    Attributes:
        device: the run's device.
        is_direct: whether tensors of that device travel without the host, which does not wait.
        ahead: by how many actions receives are posted earlier than they must, at least.
        clock: measures waits while it is set.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        group: dist.ProcessGroup,
        device: torch.device,
        directions: Directions | None = None,
    ) -> None:
        here = ranks.index(dist.get_rank())
        self.device = device
        self.is_direct = directions is not None
        self._outward: _Ways = {}
        self._inward: _Ways = {}
        for stage, peer in enumerate(ranks):
            if stage != here:
                there = group if directions is None else directions[here, stage]
                back = group if directions is None else directions[stage, here]
                self._outward[stage] = (there, dist.get_group_rank(there, peer))
                self._inward[stage] = (back, dist.get_group_rank(back, peer))
        self.ahead = 0 if self.is_direct else _AHEAD
        self._stages = device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        self.clock: StepClock | None = None
        self._inbound = {stage: _Inbound(self, stage) for stage in range(len(ranks))}

    def send(self, tensor: torch.Tensor, stage: int, *, copy: bool) -> None:
        """Sends to a stage; ``copy`` where the tensor may be changed before it has gone out."""
        payload = tensor.detach()
        if self._stages:
            payload = payload.cpu().contiguous()
        elif copy or not payload.is_contiguous():
            payload = payload.clone(memory_format=torch.contiguous_format)
        if payload.dtype not in _CARRIED:
            payload = _as_bytes(payload)
        # The group's own method: the checks of dist.isend cost as much as the message.
        group, peer = self._outward[stage]
        self._sends.append((group.send([payload], peer, 0), payload))
        if len(self._sends) > _MAX_UNFINISHED:
            self._sends.popleft()[0].wait()

    def post(self, stage: int, key: Hashable, spec: TensorSpec) -> None:
        """Posts the receive of the next tensor from a stage; `take` gives it by its key."""
        host = self._stages or not spec.on_run_device
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=_CPU if host else self.device)
        flat = buffer if spec.dtype in _CARRIED else _as_bytes(buffer)
        group, peer = self._inward[stage]
        work = group.recv([flat], peer, 0)
        self._inbound[stage].posted.append(_Posted(key, spec, work, buffer, flat))

    def take(self, stage: int, key: Hashable) -> torch.Tensor:
        """The tensor whose receive was posted with this key; waits until it is there."""
        return self._inbound[stage].take(key)

    def receive(self, stage: int, spec: TensorSpec) -> torch.Tensor:
        """The next tensor from a stage from which no other receive is posted."""
        self.post(stage, None, spec)
        return self.take(stage, None)

    def share(self, tensor: torch.Tensor, stage: int) -> None:
        """Fills bytes on all stages with those of one, outside of the order of a step's messages.

        Collective over pp: all must call.

        Args:
            tensor: of bytes, contiguous, on the run's device.
            stage: whose bytes.
        """
        if stage in self._inward:
            group, peer = self._inward[stage]
            group.recv([tensor], peer, 0).wait()
            return
        for other in self._outward:
            self.send(tensor, other, copy=False)

    def drain(self) -> None:
        """Receives and drops all that was posted and not taken."""
        for inbound in self._inbound.values():
            inbound.drain()

    def finish(self) -> None:
        """Waits for all sends and frees their buffers."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def land(self, posted: _Posted, stage: int) -> torch.Tensor:
        """Waits for a posted receive and gives its tensor, on the device where it belongs."""
        if self.clock is None:
            posted.work.wait()
        else:
            self.clock.wait(posted.work, stage, posted.key)
        if self._stages and posted.spec.on_run_device:
            return posted.buffer.to(self.device)
        return posted.buffer


class _Posted(NamedTuple):
    """A receive that was posted."""

    key: Hashable
    spec: TensorSpec
    work: Any
    buffer: torch.Tensor
    sent: torch.Tensor
    """The buffer, or its bytes."""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor whose type some backend cannot send."""
    return tensor.view(-1).view(torch.uint8)


def make_directions(groups: Groups) -> Directions:
    """A NCCL group for each direction between two stages. Collective over the world.

    Communicators are made at first use only, by the two ranks concerned.

    Args:
        groups: the groups of the run.
    """
    found: Directions = {}
    for members in groups.topology.groups("pp"):
        for source, target in permutations(range(len(members)), 2):
            pair = (members[source], members[target])
            group = groups.kept.get(MESSAGES, pair, "nccl", groups.timeout, _few_blocks)
            if group is not None:
                found[source, target] = group
    return found


def _few_blocks() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_BLOCKS
    return options


class _Inbound:
    """What one stage sends here."""

    def __init__(self, channels: Channels, stage: int) -> None:
        self.posted: deque[_Posted] = deque()
        self._channels = channels
        self._stage = stage
        self._arrived: dict[Hashable, torch.Tensor] = {}

    def take(self, key: Hashable) -> torch.Tensor:
        if self._arrived and key in self._arrived:
            return self._arrived.pop(key)
        while True:
            assert self.posted, f"no receive from stage {self._stage} is posted for {key}"
            posted = self.posted.popleft()
            tensor = self._channels.land(posted, self._stage)
            if posted.key == key:
                return tensor
            self._arrived[posted.key] = tensor

    def drain(self) -> None:
        self._arrived.clear()
        while self.posted:
            self.posted.popleft().work.wait()
