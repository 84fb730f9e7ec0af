"""One microbatch on one rank: the calls of the user's step, recorded or followed.

The first time, the calls are *recorded*: the ranks agree call by call, the home of each call runs
it and publishes what came out. Afterwards they are *followed*: each call is compared with the
program, its home runs it, the others take the result's spec from the program, and values travel
as the program says, with no message about messages.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_smp.errors import UnsupportedError, WorkerAborted
from lightning_smp.placed.functions import (
    DYNAMIC,
    MASKED,
    READS,
    REFUSED,
    function_name,
    mutates_first,
)
from lightning_smp.placed.operands import Operands, scan
from lightning_smp.placed.outcome import describe, outcome_from_plain, outcome_to_plain
from lightning_smp.placed.random import digest_draws
from lightning_smp.placed.ready import NOTHING, take_back
from lightning_smp.placed.results import Results
from lightning_smp.placed.route import Route
from lightning_smp.placed.tensor import PlacedTensor
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import (
    EVERYWHERE,
    Entry,
    Outcome,
    Program,
    SegmentTracker,
    writes_out_of_order,
)

__all__ = ["MicrobatchRun"]


class MicrobatchRun(Results):
    """The forward of one microbatch on this rank; it records its program unless it follows one.

    Args:
        context: what the runs of one step share.
        index: the microbatch.
        inputs: plain tensors that it is given, of the types and shapes that its program was
            recorded with.
    """

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of outer code: a torch function or a unit."""
        position, first_value = self.position, self.num_values
        if self.following:
            first_value = self.num_values = self.program.first_value(position)
        operands = Operands(self)
        key = (
            target.token_in(self.tokens) if type(target) is UnitEntry else target,
            self.mode_flags(),
            scan(operands, args, target in MASKED),
            scan(operands, kwargs, False) if kwargs else (),
        )
        if self.following:
            if position < len(self.entries) and self.entries[position].key == key:
                self._go_to(position + 1)
                return self._follow(
                    self.entries[position], position, target, args, kwargs, operands
                )
            self.leave_program(key)
        self.position += 1
        return self._record(key, target, args, kwargs, operands, first_value)

    def mode_flags(self) -> int:
        """Grad mode and autocast, as the keys of calls have them."""
        flags = torch.is_grad_enabled()
        device = self.device_type
        if torch.is_autocast_enabled(device):
            flags |= 2 + 4 * (torch.get_autocast_dtype(device).itemsize == 2)
        return int(flags)

    def _follow(
        self, entry: Entry, position: int, target: Any, args: Any, kwargs: Any, operands: Operands
    ) -> Any:
        me = self.rank
        self.begin_segments(entry)
        if entry.departures and entry.departures[0].consumed == position:
            self._depart_parameters(entry, position, operands)
        for edge in entry.arrivals:
            value = operands.value(edge.operand)
            rank = edge.target[0]
            if rank != me:
                value.note_copy(rank, edge.target[1])
                continue
            self.take_in(operands.tensors[edge.operand], value, edge)
        seed = self._seed(target, entry.unit_call)
        if entry.home in (me, EVERYWHERE):
            result = self._execute(target, args, kwargs, operands, seed)
            return self._wrap_real(entry, target, result, operands, position, seed)
        return self._wrap_specs(entry, target, args, kwargs, operands, position)

    def _depart_parameters(self, entry: Entry, position: int, operands: Operands) -> None:
        for edge in entry.departures:
            if edge.source[0] == self.rank and edge.consumed == position:
                self.send(operands.value(edge.operand), edge)

    def _record(
        self, key: tuple[Any, ...], target: Any, args: Any, kwargs: Any, operands: Operands,
        first_value: int,
    ) -> Any:  # fmt: skip
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
        entry = Entry(key, home, Outcome(["c", None], ()), (), (), first_value=first_value)
        self.entries.append(entry)
        entry.arrivals, entry.new_segments = self._transfers(operands, targets, position, key)
        if type(target) is UnitEntry:
            entry.cost, entry.unit_call = target.cost, self.calls_of_unit[target.index]
            self.calls_of_unit[target.index] += 1
        seed = self._seed(target, entry.unit_call)
        if home in (self.rank, EVERYWHERE):
            result = self._run_here(entry, target, args, kwargs, operands, seed, changes)
        if home != EVERYWHERE:
            entry.outcome = self._agree_on_call(entry)
        # A region that is computed again writes its units' buffers in the backward.
        self.dynamic |= entry.outcome.writes and self.region is not None
        if home in (self.rank, EVERYWHERE):
            return self._wrap_real(entry, target, result, operands, position, seed)
        return self._wrap_specs(entry, target, args, kwargs, operands, position)

    def _run_here(
        self, entry: Entry, target: Any, args: Any, kwargs: Any, operands: Operands,
        seed: int | None, changes: bool,
    ) -> Any:  # fmt: skip
        """Runs a recorded call for real; tells the others if it fails, since they wait for it."""
        try:
            result = self._execute(target, args, kwargs, operands, seed)
            if target not in READS:
                entry.outcome = describe(self, target, result, operands, changes)
        except Exception as error:
            if entry.home == self.rank:
                self.dynamic = True  # the step's code may catch it, the others will not know
                self.context.control.agree_at(
                    self.point(entry.key), [f"{type(error).__name__}: {error}", None]
                )
            raise
        return result

    def _agree_on_call(self, entry: Entry) -> Outcome:
        """The home publishes what the call did; all learn whether they made the same call."""
        mine = entry.home == self.rank
        message = [None, outcome_to_plain(entry.outcome)] if mine else None
        published = self.context.control.agree_at(self.point(entry.key), message)
        error, plain = published[entry.home]
        if error is not None:
            self.dynamic = True
            raise WorkerAborted(f"stage {entry.home} failed in {self.point(entry.key)}: {error}")
        return entry.outcome if mine else outcome_from_plain(plain)

    def follow(self, program: Program) -> None:
        """Follows a program that another microbatch has recorded."""
        assert self.position == 0
        self.program, self.following = program, True
        self.entries, self.edges = program.entries, program.edges
        if program.route is None:
            units = {unit.index: unit for unit in self.context.runtime.units}
            program.route = Route(program, self.rank, units)
        self.route = program.route
        self.seeds = program.route.seeds(self.seed_state)

    def begin(self) -> None:
        """The step's code begins."""
        if self.route is None:
            self.begin_recording()
        else:
            self.lane = self.route.enter(self.inputs, self.context.table.held)
            self._go_to(0)

    def end(self) -> None:
        """The step's code has come to its end."""
        if self.route is not None:
            self.upcoming = NOTHING
            self.route.finish(self.lane, self.inputs)
            if self.lent:
                take_back(self)

    def forget_plain(self) -> None:
        """Outer code has changed a plain tensor, perhaps more than its numbers."""
        if self.route is not None:
            self.route.forget(self.lane)

    def _go_to(self, position: int) -> None:
        """The next call is the one at this position of the program."""
        assert self.route is not None
        self.position, self.upcoming = position, self.route.at(position)

    def leave_program(self, key: tuple[Any, ...]) -> None:
        """Leaves the program: the step goes on call by call once all ranks agree on the call."""
        position, edges = self.position, self.program.edges
        self.context.deviated(self, position, key)
        self.following = False
        self.route, self.upcoming, self.lane, self.lent = None, NOTHING, [], []
        units = [entry.key[0] for entry in self.entries[:position]]
        entries = self.entries[:position]
        self.begin_recording()
        self.calls_of_unit.update(token[1] for token in units if isinstance(token, tuple))
        self.entries, self.edges = entries, list(edges)
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
        """A segment begins somewhere: other microbatches may run before the step goes on.

        Draws of outer code after this would lose their order.
        """
        if self.watch is not None:
            self.watch.look()
        if self.boundary_draws is None:
            self.boundary_draws = digest_draws(self.context.device)

    def draws_late(self) -> bool:
        """Whether outer code drew random numbers after the first boundary of segments."""
        return self.boundary_draws not in (None, digest_draws(self.context.device))

    def ends_as_recorded(self) -> bool:
        """Whether the step made all calls of its program and has the losses that it had."""
        losses = tuple(loss for loss, _ in self.losses)
        return self.position == len(self.entries) and losses == self.program.losses

    def add_loss(self, loss: PlacedTensor, gradient: torch.Tensor | None) -> None:
        """Marks a value that the backward starts from.

        Args:
            loss: the value as it is now; what is done to it later does not matter.
            gradient: its gradient, on its home.
        """
        value = loss._value
        home = max(value.home, 0)
        ordinal = value.segments[home]
        self.losses.append(((value.index, value.produced), (home, ordinal)))
        if home == self.rank:
            assert value.local is not None
            assert gradient is not None
            self.segments[ordinal].add_root(value.local, gradient)

    def complete(self) -> None:
        """Makes the recorded calls into a program."""
        program = self.program
        program.entries, program.edges = self.entries, self.edges
        program.segments = self.tracker.order()
        program.num_values = self.num_values
        program.losses = tuple(loss for loss, _ in self.losses)
        program.loss_segments = tuple(sorted({node for _, node in self.losses}))
        program.copied_edges = frozenset(
            index for index, group, version in self.sent_versions if group.version != version
        )
        program.seal()
        self.dynamic |= writes_out_of_order(self.entries)

    def begin_backward(self, loss: PlacedTensor, gradient: Any) -> None:
        """A backward inside the step begins."""
        if self.following:
            raise UnsupportedError("backward() inside a step that follows a recorded program")
        self.add_loss(loss, self.seed_of(loss, gradient))

    def end_backward(self) -> None:
        """What follows a backward inside the step belongs to new segments."""
        for rank in range(self.num_ranks):
            self.tracker.advance(rank)
        self.enter_segment()
        self.losses.clear()

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
