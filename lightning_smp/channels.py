"""Tensors between the stages: one ordered stream per ordered pair of ranks.

Sends never block. Receives are posted in the sender's order, which both sides know, a few ahead of
need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_smp.program import TensorSpec

__all__ = ["Channels"]

_AHEAD = 4
"""Receives posted beyond the one that is needed."""

_MAX_UNFINISHED = 256
"""Sends whose buffers are kept before the oldest is waited for."""


class Channels:
    """The point-to-point traffic of one rank.

    Args:
        ranks: global rank of each stage.
        group: a group of exactly these ranks, used for nothing else.
        device: the run's device; where the backend cannot reach it (gloo and CUDA), tensors are
            staged through host memory.
    """

    def __init__(
        self, ranks: tuple[int, ...], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._device = device
        self._stages = device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        self._inbound = {stage: _Inbound(self, stage) for stage in range(len(ranks))}

    def send(self, tensor: torch.Tensor, stage: int, *, copy: bool) -> None:
        """Sends to a stage; ``copy`` where the tensor may be changed before it has gone out."""
        payload = tensor.detach()
        if self._stages:
            payload = payload.cpu()
        elif copy or not payload.is_contiguous():
            payload = payload.clone(memory_format=torch.contiguous_format)
        payload = payload.contiguous().view(-1).view(torch.uint8)
        work = dist.isend(payload, group=self._group, dst=self._ranks[stage])
        self._sends.append((work, payload))
        if len(self._sends) > _MAX_UNFINISHED:
            self._sends.popleft()[0].wait()

    def expect(self, stage: int, messages: Iterable[tuple[Hashable, TensorSpec]]) -> None:
        """Notes what a stage will send, in its order."""
        self._inbound[stage].expected.extend(messages)

    def take(self, stage: int, key: Hashable) -> torch.Tensor:
        """The expected tensor with this key; waits until it is there."""
        return self._inbound[stage].take(key)

    def receive(self, stage: int, spec: TensorSpec) -> torch.Tensor:
        """The next tensor from a stage that nothing else is expected from."""
        inbound = self._inbound[stage]
        inbound.expected.append((None, spec))
        return inbound.take(None)

    def drain(self) -> None:
        """Receives and drops all that is still expected."""
        for inbound in self._inbound.values():
            inbound.drain()

    def finish(self) -> None:
        """Waits for all sends and frees their buffers."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _post(self, stage: int, spec: TensorSpec) -> tuple[Any, torch.Tensor, torch.Tensor]:
        host = self._stages or not spec.on_run_device
        device = torch.device("cpu") if host else self._device
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        flat = buffer.view(-1).view(torch.uint8)
        return dist.irecv(flat, group=self._group, src=self._ranks[stage]), buffer, flat

    def _land(self, buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        return buffer.to(self._device) if self._stages and spec.on_run_device else buffer


class _Inbound:
    """What one stage sends here."""

    def __init__(self, channels: Channels, stage: int) -> None:
        self.expected: deque[tuple[Hashable, TensorSpec]] = deque()
        self._channels = channels
        self._stage = stage
        self._posted: deque[tuple[Hashable, TensorSpec, Any]] = deque()
        self._arrived: dict[Hashable, torch.Tensor] = {}

    def take(self, key: Hashable) -> torch.Tensor:
        found = self._arrived.pop(key, None)
        while found is None:
            self._post_ahead()
            assert self._posted, f"nothing more is expected from stage {self._stage}, want {key}"
            posted_key, spec, (work, buffer, _) = self._posted.popleft()
            work.wait()
            tensor = self._channels._land(buffer, spec)
            if posted_key == key:
                found = tensor
            else:
                self._arrived[posted_key] = tensor
        self._post_ahead()
        return found

    def drain(self) -> None:
        self._arrived.clear()
        while self.expected or self._posted:
            self._post_ahead()
            self._posted.popleft()[2][0].wait()

    def _post_ahead(self) -> None:
        while self.expected and len(self._posted) <= _AHEAD:
            key, spec = self.expected.popleft()
            self._posted.append((key, spec, self._channels._post(self._stage, spec)))
