"""One microbatch on one rank: the calls of the user's step, recorded or followed.

The first time, the calls are *recorded*: the ranks agree call by call, the home of each call runs
it and publishes what came out. Afterwards they are *followed*: each call is compared with the
program, its home runs it, the others take the result's spec from the program, and values travel
as the program says, with no message about messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.errors import CommunicationError, UnsupportedError
from lightning_smp.placed.autograd import Segment, arrive
from lightning_smp.placed.functions import (
    DYNAMIC,
    MASKED,
    READS,
    REFUSED,
    function_name,
    mutates_first,
    read_everywhere,
)
from lightning_smp.placed.operands import Operands, scan
from lightning_smp.placed.outcome import describe, matches, outcome_from_plain, outcome_to_plain
from lightning_smp.placed.random import DrawState, isolated_draws, mix_seed
from lightning_smp.placed.structure import build, map_tensors
from lightning_smp.placed.tensor import PlacedTensor, Value, adopt, spec_of
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Edge, Entry, Outcome, Program, SegmentTracker

if TYPE_CHECKING:
    from lightning_smp.placed.runtime import StepContext

__all__ = ["MicrobatchRun"]


class MicrobatchRun:
    """The forward of one microbatch on this rank.

    Args:
        context: what the runs of one step share.
        index: the microbatch.
        program: the program to follow, or None to record one.
    """

    def __init__(self, context: StepContext, index: int, program: Program | None) -> None:
        self.context = context
        self.index = index
        self.rank = context.rank
        self.num_ranks = context.num_ranks
        self.following = program is not None
        self.program = program if program is not None else Program()
        self.entries: list[Entry] = self.program.entries if self.following else []
        self.edges: list[Edge] = self.program.edges if self.following else []
        self.position = 0
        self.tracker = SegmentTracker(self.num_ranks)
        self.segments: dict[int, Segment] = {0: Segment()}
        self.num_values = 0
        self.opaque: dict[int, int] = {}
        self.opaque_objects: list[Any] = []
        self.parameters: dict[int, Value] = {}
        self.calls_of_unit: dict[int, int] = {}
        self.region: list[tuple[Entry, int | None, Any]] | None = None
        self.in_unit: UnitEntry | None = None
        self.sent_versions: list[tuple[int, Any, int]] = []
        self.dynamic = False
        self.drew = False
        self.boundary_draws: int | None = None
        self.sent: set[int] = set()
        self.program_loss: tuple[int, int] | None = None

    # ---- calls ---------------------------------------------------------------------------

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of outer code: a torch function or a unit."""
        operands = Operands(self)
        key = (
            target.token if type(target) is UnitEntry else target,
            self._mode_flags(),
            scan(operands, args, target in MASKED),
            scan(operands, kwargs, False),
        )
        if self.following:
            position = self.position
            if position < len(self.entries) and self.entries[position].key == key:
                self.position += 1
                return self._follow(self.entries[position], position, target, args, kwargs, operands)
            self.leave_program(key)
        self.position += 1
        return self._record(key, target, args, kwargs, operands)

    def _mode_flags(self) -> int:
        flags = torch.is_grad_enabled()
        device = self.context.device.type
        if torch.is_autocast_enabled(device):
            flags |= 2 + 4 * (torch.get_autocast_dtype(device).itemsize == 2)
        return int(flags)

    # ---- life cycle ------------------------------------------------------------------------

    def follow(self, program: Program) -> None:
        """Follows a program that another microbatch of the step has recorded."""
        assert self.position == 0
        self.program, self.following = program, True
        self.entries, self.edges = program.entries, program.edges

    def leave_program(self, key: tuple[Any, ...]) -> None:
        """Leaves the program: the step goes on call by call once all ranks agree on the call."""
        position, edges = self.position, self.program.edges
        self.context.deviated(self, position, key)
        self.following = False
        self.entries = list(self.entries[:position])
        self.edges = list(edges)
        self.program = Program()
        reached = [edge for edge in edges if edge.consumed < position]
        self.tracker = SegmentTracker.resumed(self.tracker.current, reached)
        for segment in self.segments.values():
            for index in list(segment.left):
                if edges[index].consumed >= position:
                    del segment.left[index]

    def planted(self) -> list[tuple[str, str]]:
        """(module, attribute) of the tensors that units leave in their attributes."""
        names = {unit.index: unit.name for unit in self.context.runtime.units}
        return [
            (f"{names[entry.key[0][1]]}.{path}".rstrip("."), attribute)
            for entry in self.entries
            for path, attribute, _ in entry.outcome.escapes
        ]

    def note_boundary(self) -> None:
        """A segment begins somewhere; draws of outer code after this would lose their order."""
        if self.boundary_draws is None:
            self.boundary_draws = DrawState(self.context.device).digest()

    def draws_late(self) -> bool:
        """Whether outer code drew random numbers after the first boundary of segments."""
        return self.boundary_draws not in (None, DrawState(self.context.device).digest())

    def note_loss(self, loss: Any) -> None:
        """Marks the value that the backward starts from."""
        self.program_loss = None
        if not isinstance(loss, PlacedTensor):
            return
        value = loss._value
        home = max(value.home, 0)
        ordinal = value.segments[home]
        self.program_loss = (home, ordinal)
        if home == self.rank:
            self.segments[ordinal].loss = value.local

    def complete(self) -> None:
        """Makes the recorded calls into a program."""
        program = self.program
        program.entries, program.edges = self.entries, self.edges
        program.segments = self.tracker.order()
        program.loss_segment = self.program_loss
        program.copied_edges = frozenset(
            index for index, group, version in self.sent_versions if group.version != version
        )
        program.seal()

    def begin_backward(self, loss: PlacedTensor) -> None:
        """A backward inside the step begins."""
        if self.following:
            raise UnsupportedError("backward() inside a step that follows a recorded program")
        self.note_loss(loss)

    def end_backward(self) -> None:
        """What follows a backward inside the step belongs to new segments."""
        for rank in range(self.num_ranks):
            self.tracker.advance(rank)
        self._enter_segment()
        self.program_loss = None

    def seed_of(self, loss: PlacedTensor, gradient: Any) -> torch.Tensor | None:
        """The gradient that a backward starts with, on the loss's home."""
        local = loss._value.local
        if max(loss._value.home, 0) != self.rank or local is None:
            return None
        if gradient is None:
            if local.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            return torch.ones_like(local)
        if isinstance(gradient, PlacedTensor):
            gradient = gradient._value.local
        assert gradient is not None
        return gradient.detach()  # type: ignore[no-any-return]

    # ---- following -----------------------------------------------------------------------

    def _follow(
        self, entry: Entry, position: int, target: Any, args: Any, kwargs: Any, operands: Operands
    ) -> Any:
        me = self.rank
        for rank in entry.new_segments:
            self.tracker.current[rank] += 1
            if rank == me:
                self._enter_segment()
        if entry.departures and entry.departures[0].consumed == position:
            self._depart_parameters(entry, position, operands)
        for edge in entry.arrivals:
            value = operands.value(edge.operand)
            rank = edge.target[0]
            if rank == me:
                self._arrive(value, edge)
            value.holders[rank] = value.group.version
            value.segments[rank] = edge.target[1]
        if entry.home == me or entry.home == EVERYWHERE:
            seed = self._seed(target)
            result = self._execute(target, args, kwargs, operands, seed)
            return self._wrap_real(entry, target, result, operands, position, seed)
        self._seed(target)
        return self._wrap_specs(entry, target, args, kwargs, operands, position)

    def _depart_parameters(self, entry: Entry, position: int, operands: Operands) -> None:
        for edge in entry.departures:
            if edge.source[0] == self.rank and edge.consumed == position:
                self._send(operands.value(edge.operand), edge)

    # ---- recording -----------------------------------------------------------------------

    def _record(
        self, key: tuple[Any, ...], target: Any, args: Any, kwargs: Any, operands: Operands
    ) -> Any:
        position = len(self.entries)
        is_read = target in READS
        if target in REFUSED:
            raise UnsupportedError(
                f"{function_name(target)} on a tensor of the model: {REFUSED[target]}. "
                "Move this code into a submodule, which runs on one rank."
            )
        self.dynamic |= target in DYNAMIC
        changes = type(target) is not UnitEntry and mutates_first(target, kwargs)
        home = EVERYWHERE if is_read else self._choose_home(operands, changes, target)
        targets = range(self.num_ranks) if home == EVERYWHERE else (home,)
        arrivals, new_segments = self._transfers(operands, targets, position)
        seed = self._seed(target)
        entry = Entry(key, home, Outcome(["c", None], ()), arrivals, new_segments)
        self.entries.append(entry)
        if type(target) is UnitEntry:
            entry.cost = target.cost
        if home in (self.rank, EVERYWHERE):
            result = self._execute(target, args, kwargs, operands, seed)
            if not is_read:
                entry.outcome = describe(self, target, result, operands, changes)
        if home != EVERYWHERE:
            entry.outcome = self._agree_on_call(entry, target)
        if home in (self.rank, EVERYWHERE):
            return self._wrap_real(entry, target, result, operands, position, seed)
        return self._wrap_specs(entry, target, args, kwargs, operands, position)

    def _agree_on_call(self, entry: Entry, target: Any) -> Outcome:
        """The home publishes what the call did; all check that they made the same call."""
        mark = self.context.key_mark(entry.key)
        mine = entry.home == self.rank
        message = [mark, outcome_to_plain(entry.outcome)] if mine else None
        home_mark, plain = self.context.control.publish(message, entry.home)
        if home_mark != mark:
            raise CommunicationError(
                f"stage {self.rank}, microbatch {self.index}: call {len(self.entries) - 1} is "
                f"{self.context.describe_call(entry.key)} here, but stage {entry.home} made another "
                "call or gave other operands. All stages must run the same step on the same data: "
                "look for code that depends on the rank, on local data or on an unseeded draw."
            )
        return entry.outcome if mine else outcome_from_plain(plain)

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

    def _transfers(
        self, operands: Operands, targets: Any, position: int
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
                if moves and self.tracker.connect(value.node, rank):
                    new_segments.append(rank)
                pending.append((ordinal, rank, moves))
        if new_segments and not self.following:
            self.note_boundary()
        if self.rank in new_segments:
            for _ in range(new_segments.count(self.rank)):
                self._enter_segment()
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
            self._send(value, edge)
        if rank == self.rank:
            self._arrive(value, edge)
        value.holders[rank] = value.group.version
        value.segments[rank] = target[1]
        return edge

    # ---- moving --------------------------------------------------------------------------

    def _enter_segment(self) -> None:
        """Starts this rank's next segment; the engine may do other work first."""
        self.segments[len(self.segments)] = Segment()
        if self.following:
            self.context.pause(self)

    def _send(self, value: Value, edge: Edge) -> None:
        tensor = value.local
        assert tensor is not None
        if edge.spec.requires_grad:
            self.segments[edge.source[1]].leave(edge.index, tensor)
        self.sent.add(edge.index)
        if edge.is_message:
            copy = not self.following or edge.index in self.program.copied_edges
            self.context.channels.send(tensor.detach(), edge.target[0], copy=copy)

    def _arrive(self, value: Value, edge: Edge) -> None:
        if edge.source[0] == edge.target[0]:
            tensor = value.local
            assert tensor is not None
            self.segments[edge.source[1]].leave(edge.index, tensor)
            payload = tensor.detach()
        else:
            payload = self.context.receive(self, edge)
        segment = self.segments[edge.target[1]]
        value.local = arrive(payload, segment, edge.index) if edge.spec.requires_grad else payload

    # ---- executing -----------------------------------------------------------------------

    def _seed(self, target: Any) -> int | None:
        """The seed of a unit's own random stream; outer code draws from the replicated one."""
        if type(target) is not UnitEntry:
            return None
        ordinal = self.calls_of_unit.get(target.index, 0)
        self.calls_of_unit[target.index] = ordinal + 1
        return mix_seed(*self.context.seed, self.index, target.index, ordinal)

    def _execute(
        self, target: Any, args: Any, kwargs: Any, operands: Operands, seed: int | None
    ) -> Any:
        """Runs the call for real on this rank's tensors."""
        locals_ = operands.localize()
        operands.versions = [t._version for t in locals_]
        supply = iter(locals_)
        args = map_tensors(args, lambda _: next(supply))
        kwargs = map_tensors(kwargs, lambda _: next(supply))
        if seed is None:
            if self.following:
                return target(*args, **kwargs)
            before = DrawState(self.context.device)
            result = target(*args, **kwargs)
            self.drew = before.digest() != DrawState(self.context.device).digest()
            return result
        watched = not self.following or target.draws_python
        with isolated_draws(seed, self.context.device, guard_python=watched) as draws:
            result = self._execute_unit(target, args, kwargs)
            if not self.following:
                self.drew = draws.used()
                target.draws_python |= draws.used_python()
        return result

    def _draw_alike(self, target: Any, args: Any, kwargs: Any) -> None:
        """Advances the replicated stream as the home's call did, on tensors without meaning."""

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, PlacedTensor):
                return tensor
            with torch._C.DisableTorchFunctionSubclass():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        with torch.no_grad():
            target(*map_tensors(args, stand_in), **map_tensors(kwargs, stand_in))

    def replay(
        self, replay: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        seed: int | None,
    ) -> Any:  # fmt: skip
        """Runs a call again on real operands, for activation checkpointing."""
        if seed is None:
            return target(*args, **kwargs)
        with isolated_draws(seed, self.context.device, guard_python=True):
            replay.in_unit = target
            try:
                return target.run(args, kwargs, observe=False)
            finally:
                replay.in_unit = None

    def _execute_unit(self, unit: UnitEntry, args: Any, kwargs: Any) -> Any:
        self.in_unit = unit
        try:
            return unit.run(args, kwargs, observe=not self.following)
        finally:
            self.in_unit = None

    # ---- results -------------------------------------------------------------------------

    def _wrap_real(
        self, entry: Entry, target: Any, result: Any, operands: Operands, position: int,
        seed: int | None,
    ) -> Any:  # fmt: skip
        if entry.home == EVERYWHERE and target in READS:
            return result
        outcome = entry.outcome
        if entry.home == EVERYWHERE and not any(leaf.spec.requires_grad for leaf in outcome.leaves):
            return result
        real: list[torch.Tensor] = []
        problem = matches(self, target, result, outcome, real)
        if problem:
            raise CommunicationError(
                f"stage {self.rank}, microbatch {self.index}: {self._label(target)} {problem}, while "
                "the other stages expect what it gave when the step was recorded. A result whose "
                "shape depends on data must be made in the code between submodules, or inside one "
                "submodule that reduces it to a fixed shape."
            )
        return self._finish(entry, target, operands, position, real, seed)

    def _wrap_specs(
        self, entry: Entry, target: Any, args: Any, kwargs: Any, operands: Operands, position: int
    ) -> Any:
        if entry.outcome.random and type(target) is not UnitEntry:
            self._draw_alike(target, args, kwargs)
        return self._finish(entry, target, operands, position, None, None)

    def _finish(
        self,
        entry: Entry,
        target: Any,
        operands: Operands,
        position: int,
        real: list[torch.Tensor] | None,
        seed: int | None,
    ) -> Any:
        """Wraps the result, notes what was changed in place and sends what others wait for."""
        outcome = entry.outcome
        made: dict[int, Value] = {}
        for ordinal, requires_grad in outcome.mutated:
            value = self._note_mutation(operands, ordinal, requires_grad, entry.home, position, target)
            made[value.index] = value
        leaves: list[Any] = []
        for ordinal, leaf in enumerate(outcome.leaves):
            if leaf.same >= 0:
                leaves.append(operands.tensors[leaf.same])
                continue
            value = Value(self, self.num_values, entry.home, self._home_node(entry.home))
            self.num_values += 1
            value.produced = position
            self._note_segments(value, entry.home)
            if leaf.view >= 0:
                operands.join(value, leaf.view)
            elif leaf.view < -1:  # a view of another part of this result
                operands.share(value, leaves[-2 - leaf.view]._value)
            if real is not None:
                value.local = real[ordinal]
            made[value.index] = value
            device = self.context.device if leaf.spec.on_run_device else torch.device("cpu")
            leaves.append(PlacedTensor(leaf.spec, device, value))
        if real is not None and entry.departures and self.following:
            for edge in entry.departures:
                if edge.source[0] == self.rank and edge.consumed != position:
                    self._send(_find(edge.value, made), edge)
        if type(target) is UnitEntry and outcome.escapes:
            target.plant(outcome.escapes, leaves, operands.objects)
        result = build(outcome.template, leaves, operands.objects)
        if self.region is not None:
            self.region.append((entry, seed, None if real is not None else result))
        return result

    def _home_node(self, home: int) -> tuple[int, int]:
        return self.tracker.node(max(home, 0))

    def _note_segments(self, value: Value, home: int) -> None:
        if home == EVERYWHERE:
            value.segments = dict(enumerate(self.tracker.current))
        else:
            value.segments = {home: self.tracker.current[home]}

    def _note_mutation(
        self,
        operands: Operands,
        ordinal: int,
        requires_grad: bool,
        home: int,
        position: int,
        target: Any,
    ) -> Value:
        """An operand was changed in place on the call's home: its copies elsewhere are stale."""
        value, tensor = operands.values[ordinal], operands.tensors[ordinal]
        if value is None:
            value = self._adopt_plain(tensor, target, home)
        elif value.home != home:
            if value.group.size > 1 or value.stages:
                raise UnsupportedError(
                    f"{self._label(target)} on stage {home} changes in place a tensor of stage "
                    f"{value.home} that has views there or is a parameter. "
                    "Give it a copy: x.clone()."
                )
            value.home = home
        elif value.group.size > 1 and not value.stages and value.node != self._home_node(home) and requires_grad:
            raise UnsupportedError(
                f"{self._label(target)} changes in place a tensor with views after its stage has "
                "sent and received in between; its gradient would be cut. Use the out-of-place form."
            )
        value.group.version += 1
        value.group.changed = position
        value.node = self._home_node(home)
        value.produced = position
        self._note_segments(value, home)
        mine = operands.local_of(ordinal)
        if mine is not None and mine is not tensor and home in (self.rank, EVERYWHERE):
            value.local = mine
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(tensor, PlacedTensor) and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        return value

    def _adopt_plain(self, tensor: torch.Tensor, target: Any, home: int) -> Value:
        """A replicated tensor was written on one rank: from now on it is placed there."""
        if isinstance(tensor, torch.nn.Parameter) or self.context.has_aliases(tensor):
            raise UnsupportedError(
                f"{self._label(target)} writes a value of stage {home} into a tensor of shape "
                f"{tuple(tensor.shape)} that all stages hold and that is a parameter or a view of "
                "another tensor. Write into a fresh tensor: x = x.clone()."
            )
        value = Value(self, self.num_values, home, self._home_node(home))
        self.num_values += 1
        if home in (self.rank, EVERYWHERE):
            with torch.enable_grad():
                value.local = tensor.view_as(tensor)  # the object itself becomes the placed one
        value.is_adopted = True
        adopt(tensor, value)
        return value

    def inherit(self, tensor: PlacedTensor) -> Value:
        """An adopted tensor (a buffer, say) goes on in this microbatch where the last left it."""
        former = tensor._value
        value = Value(self, self.num_values, former.home, (max(former.home, 0), 0))
        self.num_values += 1
        value.is_adopted = True
        if former.local is not None:
            value.local = former.local.detach()
        tensor._value = value
        return value

    def _label(self, target: Any) -> str:
        if type(target) is UnitEntry:
            return f"unit {target.name!r}"
        return function_name(target)

    # ---- the values of parameters and buffers ----------------------------------------------

    def held_value(self, tensor: torch.Tensor, name: str, stages: tuple[int, ...]) -> Value:
        """The value of a parameter or buffer that is real on ``stages`` only."""
        value = self.parameters.get(id(tensor))
        if value is None:
            value = Value(self, -2 - len(self.parameters), stages[0], (stages[0], 0))
            value.stages, value.name = stages, name
            value.group.size = 2  # changed in place only where it lives
            if self.rank in stages:
                value.local = tensor
            self.parameters[id(tensor)] = value
        return value

    def register_hook(self, tensor: PlacedTensor, hook: Any) -> Any:
        """A hook on the gradient of a placed tensor: runs on its home, with the whole gradient."""
        value = tensor._value
        if value.home != self.rank:
            return _NoHandle()
        if value.segments[self.rank] != value.node[1]:
            raise UnsupportedError(
                f"register_hook on {tensor!r} after its stage has sent and received in between: the "
                "hook would see part of the gradient. Register it where the tensor is made."
            )
        assert value.local is not None
        return value.local.register_hook(hook)

    def read(self, tensor: PlacedTensor) -> torch.Tensor:
        """The real numbers on this rank; collective over the pipeline group."""
        with self.context.outside_outer_mode():
            result: torch.Tensor = self.call(read_everywhere, (tensor,), {})
        return result


class _NoHandle:
    """The handle of a hook that is registered on another rank."""

    def remove(self) -> None:
        """There is nothing to remove here."""


def _find(index: int, made: dict[int, Value]) -> Value:
    """A value that a call has made or changed, or one that shares storage with such."""
    found = made.get(index)
    if found is None:
        found = next(v.group.members[index] for v in made.values() if index in v.group.members)
    return found
