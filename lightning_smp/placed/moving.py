"""Where a call runs, and how its operands get there."""

from __future__ import annotations

from typing import Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.autograd import Segment
from lightning_smp.placed.functions import function_name
from lightning_smp.placed.operands import Operands
from lightning_smp.placed.run_state import RunState
from lightning_smp.placed.tensor import Value, spec_of
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Edge, Entry

__all__ = ["Moving"]


class Moving(RunState):
    """Chooses homes and moves values between ranks and segments."""

    def _is_later(self, value: Value, other: Value) -> bool:
        """Whether a call on both should rather run where ``value`` lives.

        That is downstream, so that sums over stages do not go back and forth.
        """
        if value.node != other.node:
            if self.tracker.leads(other.node, value.node):
                return True
            if self.tracker.leads(value.node, other.node):
                return False
        return value.produced > other.produced

    def _choose_home(self, operands: Operands, changes: bool, target: Any) -> int:
        """The latest home among the placed operands; a unit's home is given by the partition."""
        if type(target) is UnitEntry and target.stage >= 0:
            return target.stage
        latest, held = None, None
        for value in operands.values:
            if value is None or value.home == EVERYWHERE:
                continue
            if value.stages:
                held = value if held is None else held
            elif latest is None or self._is_later(value, latest):
                latest = value
        first = operands.values[0] if changes and operands.values else None
        if first is not None and (first.group.size > 1 or first.stages):
            if first.group.of_plain or len(first.stages) > 1:
                raise UnsupportedError(
                    f"{function_name(target)} changes in place a view of a tensor that all stages "
                    f"hold{' (parameter ' + first.name + ')' if first.name else ''}. "
                    "Use the out-of-place form, or .clone() first."
                )
            if first.home == EVERYWHERE and latest is not None:
                raise UnsupportedError(
                    f"{function_name(target)} writes a value of one stage into a tensor that every "
                    "stage computes and that has views. Use the out-of-place form."
                )
            return first.home
        if latest is not None:
            return latest.home
        return EVERYWHERE if held is None else held.home

    def _transfers(
        self, operands: Operands, targets: Any, position: int, key: tuple[Any, ...]
    ) -> tuple[tuple[Edge, ...], tuple[int, ...]]:
        """Decides, notes and carries out the moves that a call needs."""
        new_segments: list[int] = []
        pending: list[tuple[int, int, bool]] = []
        seen: set[tuple[int, int]] = set()
        for ordinal, value in enumerate(operands.values):
            if value is None:
                continue
            for rank in targets:
                if (value.index, rank) in seen or rank in value.stages:
                    continue
                seen.add((value.index, rank))
                moves = not value.is_current_on(rank)
                if moves and value.stages:  # a parameter leaves from where its stage is by now
                    value.node = self.tracker.node(value.home)
                if moves and self.tracker.connect(value.node, rank):
                    new_segments.append(rank)
                pending.append((ordinal, rank, moves))
        if any(moves for _, _, moves in pending):  # before anybody waits for a tensor
            self.context.control.agree_at(self.point(key))
        if new_segments and not self.following:
            self.note_boundary()
        if self.rank in new_segments:
            for _ in range(new_segments.count(self.rank)):
                self.enter_segment()
        arrivals = []
        for ordinal, rank, moves in pending:
            edge = self._edge(operands, ordinal, rank, moves, position)
            if edge is not None:
                arrivals.append(edge)
        return tuple(arrivals), tuple(new_segments)

    def _edge(
        self, operands: Operands, ordinal: int, rank: int, moves: bool, position: int
    ) -> Edge | None:
        value = operands.values[ordinal]
        tensor = operands.tensors[ordinal]
        with torch._C.DisableTorchFunctionSubclass():
            spec = spec_of(tensor, self.context.device)
        target = self.tracker.node(rank)
        if moves:
            source = value.node
        else:
            source = (rank, value.segments.get(rank, target[1]))
            if not spec.requires_grad or source == target:
                return None
        produced = position if value.ready < 0 else value.ready
        edge = Edge(len(self.edges), value.index, source, target, produced, position, spec, ordinal)
        self.edges.append(edge)
        self.sent_versions.append((edge.index, value.group, value.group.version))
        if moves and source[0] == self.rank:
            self.send(value, edge)
        if rank == self.rank:
            self.arrive(value, edge)
        else:
            value.note_copy(rank, target[1])
        return edge

    def begin_segments(self, entry: Entry) -> None:
        """Starts the segments, here and elsewhere, that begin with a followed call."""
        for rank in entry.new_segments:
            self.tracker.current[rank] += 1
            if rank == self.rank:
                self.enter_segment()

    def enter_segment(self) -> None:
        """Starts this rank's next segment; the engine may do other work first."""
        self.segments[len(self.segments)] = Segment()
        if self.following:
            self.context.pause(self)

    def send(self, value: Value, edge: Edge) -> None:
        """Sends this rank's tensor along an edge that begins here."""
        tensor = _one_tensor(value)
        if edge.spec.requires_grad:
            segment = self.segments[edge.source[1]]
            earlier = segment.carried.get(value.index)
            if earlier is None:
                segment.leave(edge.index, tensor)
            else:  # the tensor is a leaf of a later segment by now
                segment.left[edge.index] = earlier
        self.sent.add(edge.index)
        if edge.is_message:
            copy = not self.following or edge.index in self.program.copied_edges
            self.context.channels.send(tensor, edge.target[0], copy=copy)

    def take_in(self, tensor: torch.Tensor, value: Value, edge: Edge) -> None:
        """An operand of a followed call arrives; its placeholder, if in the lane, is lent."""
        if value.local is None and value.index >= 0 and self.lane[value.index] is tensor:
            self.lent.append(tensor)
        self.arrive(value, edge)

    def arrive(self, value: Value, edge: Edge) -> None:
        """Takes the tensor of an edge that ends here, the value's present version."""
        is_carried = not edge.crosses
        if is_carried:
            tensor = _one_tensor(value)
            self.segments[edge.source[1]].carry(edge.index, tensor, value.index)
            payload = tensor.detach()
        else:
            payload = self.context.receive(self, edge)
        if edge.spec.requires_grad:
            is_fixed = self.following and self.rank not in self.program.changing
            segment = self.segments[edge.target[1]]
            payload = segment.enter(edge.index, payload, is_shared=is_carried, is_fixed=is_fixed)
        value.local = payload
        value.note_copy(self.rank, edge.target[1])


def _one_tensor(value: Value) -> torch.Tensor:
    """This rank's tensor, made whole if it stands for parts on several ranks."""
    tensor = value.local
    assert tensor is not None
    if type(tensor) is torch.Tensor:
        return tensor
    whole = getattr(type(tensor), "smp_whole", None)
    if whole is not None:
        value.local = tensor = whole(tensor)
    assert tensor is not None
    return tensor
