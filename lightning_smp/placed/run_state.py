"""What one microbatch on one rank keeps while its step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.autograd import Segment
from lightning_smp.placed.functions import function_name, read_everywhere
from lightning_smp.placed.places import ABSENT
from lightning_smp.placed.random import stir
from lightning_smp.placed.ready import NOTHING, ReadyCall
from lightning_smp.placed.route import Route
from lightning_smp.placed.state import AttributeWatch
from lightning_smp.placed.tensor import PlacedTensor, Value, adopt
from lightning_smp.placed.units import UnitEntry
from lightning_smp.program import EVERYWHERE, Edge, Entry, Program, SegmentNode, SegmentTracker

if TYPE_CHECKING:
    from lightning_smp.placed.runtime import StepContext

__all__ = ["RunState"]

_SHOWN = 300
"""Length to which a call's description is cut."""


class RunState:
    """The state of a microbatch's forward, and the values that are there without a call."""

    # What most microbatches never change. A step makes many of these objects.
    following = False
    route: Route | None = None
    upcoming: ReadyCall = NOTHING
    position = 0
    num_values = 0
    region: list[tuple[Entry, int | None, Any]] | None = None
    in_unit: UnitEntry | None = None
    dynamic = False
    drew = False
    wrote = False
    boundary_draws: int | None = None
    watch: AttributeWatch | None = None

    # What only a run that follows needs (`follow`).
    seeds: list[int]

    # What only a run that records needs (`begin_recording`).
    program: Program
    entries: list[Entry]
    edges: list[Edge]
    calls_of_unit: Counter[int]
    sent_versions: list[tuple[int, Any, int]]

    def __init__(
        self, context: StepContext, index: int, inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        self.context = context
        self.index = index
        self.inputs = inputs
        self.mark = object()  # not the run itself: values may live longer
        self.rank = context.rank
        self.device_type = context.device.type
        self.num_ranks = context.num_ranks
        self.tokens = context.tokens
        self.lane: list[Any] = []
        self.lent: list[torch.Tensor] = []  # of the lane, those that are real here
        self.tracker = SegmentTracker(self.num_ranks)
        self.segments: dict[int, Segment] = {0: Segment()}
        self.opaque: dict[int, tuple[Any, ...]] = {}
        self.opaque_objects: list[Any] = []
        self.parameters: dict[int, Value] = {}
        self.seed_state = stir(context.seed_state, index)
        self.sent: set[int] = set()
        self.losses: list[tuple[tuple[int, int], SegmentNode]] = []

    def begin_recording(self) -> None:
        """The run records a program of its own from here on."""
        self.program = Program()
        self.entries, self.edges = [], []
        self.calls_of_unit = Counter()
        self.sent_versions = []

    def close(self) -> None:
        """The step is over: lets go of what refers to this run, so that no cycle keeps it."""
        self.parameters.clear()
        self.opaque.clear()
        self.opaque_objects.clear()
        self.watch = None
        if self.route is not None and self.lane:
            for tensor in self.lent:  # what the step returned goes its own way
                self.lane[tensor._value.index] = ABSENT  # type: ignore[attr-defined]
            self.route.leave(self.lane)
        self.lane, self.lent = [], []

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of outer code."""
        raise NotImplementedError

    def held_value(self, tensor: torch.Tensor, name: str, stages: tuple[int, ...]) -> Value:
        """The value of a parameter or buffer that is real on ``stages`` only."""
        value = self.parameters.get(id(tensor))
        if value is None:
            value = Value(self.mark, -2 - len(self.parameters), stages[0], (stages[0], 0))
            value.stages, value.name = stages, name
            value.group.size = 2  # changed in place only where it lives
            if self.rank in stages:
                value.local = tensor
            self.parameters[id(tensor)] = value
        return value

    def inherit(self, tensor: PlacedTensor) -> Value:
        """An adopted tensor (a buffer, say) goes on in this microbatch where the last left it."""
        former = tensor._value
        value = Value(self.mark, self.num_values, former.home, (max(former.home, 0), 0))
        self.num_values += 1
        value.is_adopted = True
        if former.local is not None:
            value.local = former.local.detach()
        tensor._value = value
        return value

    def register_hook(self, tensor: PlacedTensor, hook: Any) -> Any:
        """A hook on the gradient of a placed tensor: runs on its home, with the whole gradient."""
        value = tensor._value
        if value.home != self.rank:
            return _NoHandle()
        if value.segments[self.rank] != value.node[1]:
            raise UnsupportedError(
                f"register_hook on {tensor!r} after its stage has sent and received in between: "
                "the hook would see part of the gradient. Register it where the tensor is made."
            )
        assert value.local is not None
        return value.local.register_hook(hook)

    def read(self, tensor: PlacedTensor) -> torch.Tensor:
        """The real numbers on this rank; collective over the pipeline group."""
        with self.context.outside_outer_mode():
            result: torch.Tensor = self.call(read_everywhere, (tensor,), {})
        return result

    def _adopt_plain(self, tensor: torch.Tensor, target: Any, home: int) -> Value:
        """A replicated tensor was written on one rank: from now on it is placed there."""
        if isinstance(tensor, torch.nn.Parameter) or self.context.has_aliases(tensor):
            raise UnsupportedError(
                f"{self._label(target)} writes a value of stage {home} into a tensor of shape "
                f"{tuple(tensor.shape)} that all stages hold and that is a parameter or a view of "
                "another tensor. Write into a fresh tensor: x = x.clone()."
            )
        value = Value(self.mark, self.num_values, home, self._home_node(home))
        self.num_values += 1
        if home in (self.rank, EVERYWHERE):
            with torch.enable_grad():
                value.local = tensor.view_as(tensor)  # the object itself becomes the placed one
        value.is_adopted = self.context.adopted = True
        adopt(tensor, value)
        return value

    def point(self, key: tuple[Any, ...]) -> str:
        """Where in the step this is, in words that are equal on ranks that made equal calls."""
        call = self.context.describe_call(key)
        if len(call) > _SHOWN:
            call = f"{call[:_SHOWN]}... ({self.context.key_mark(key)})"
        return f"call {len(self.entries) - 1} of microbatch {self.index}, {call}"

    def _label(self, target: Any) -> str:
        if type(target) is UnitEntry:
            return f"unit {target.name!r}"
        return function_name(target)

    def _home_node(self, home: int) -> tuple[int, int]:
        return self.tracker.node(max(home, 0))


class _NoHandle:
    """The handle of a hook that is registered on another rank."""

    def remove(self) -> None:
        """There is nothing to remove here."""
