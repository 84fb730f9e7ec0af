"""What each atom costs: a watch over operations and saved activations of one fake step.

Nothing here knows of stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_smp.tensor_parallel.operations import COLLECTIVES, communicated_bytes

__all__ = ["AtomCost", "CostWatch", "DeviceModel", "nbytes"]

_ATEN = torch.ops.aten
_GATHERS = frozenset(
    {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather, _ATEN.select_scatter}
)
# A fake step runs on the CPU, whose attention torch does not count; the formula is the same.
_CPU_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
_UNINITIALISED = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty})


@dataclass(frozen=True)
class DeviceModel:
    """The roofline that turns work into seconds; only ratios matter to the partition.

    Attributes:
        flops_per_s: Attainable floating-point operations per second.
        bytes_per_s: Attainable memory bandwidth in bytes per second.
        link_bytes_per_s: What a rank sends to its tensor group, in bytes per second.
    """

    flops_per_s: float = 300e12
    bytes_per_s: float = 3e12
    link_bytes_per_s: float = 300e9

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Returns the estimated time of an operation in seconds."""
        return flops / self.flops_per_s + moved_bytes / self.bytes_per_s


@dataclass(frozen=True)
class AtomCost:
    """What one step on one microbatch costs in one atom.

    Attributes:
        calls: Number of calls by outer code.
        flops: Floating-point operations of the forwards.
        moved_bytes: Memory traffic of the forwards.
        forward_s: Estimated time of the forwards, in seconds.
        backward_s: Estimated time of the backwards, in seconds; 0 where no gradient flows.
        output_bytes: Size of the results of the last call.
        saved_bytes: Activations kept for the backward.
        parameters: Number of parameter elements.
        parameter_bytes: Their size.
        state_bytes: Parameters and buffers, with gradients and two optimizer states for trainable
            ones.
    """

    calls: int = 0
    flops: int = 0
    moved_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Forward plus backward, in seconds."""
        return self.forward_s + self.backward_s

    def __add__(self, other: AtomCost) -> AtomCost:
        return AtomCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(AtomCost)))


def nbytes(tensor: Tensor) -> int:
    """Returns the size of a tensor's elements in bytes, whether or not it has storage."""
    return tensor.numel() * tensor.element_size()


@dataclass
class _Tally:
    calls: int = 0
    flops: int = 0
    moved_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0


class CostWatch(TorchDispatchMode):
    """Counts the operations of a fake step and attributes them to the atom in which they run.

    Work of outer code goes to the atom that finished last, since a placed operation runs where its
    latest operand lives; before the first atom it goes to none (``None``).

    Args:
        model: The (copied) root; its parameters and buffers are never activations.
        modules: The (copied) module of each atom, by name.
        device: The roofline.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], device: DeviceModel
    ) -> None:
        super().__init__()
        self._modules = modules
        self._device = device
        self._stack: list[str] = []
        self._last: str | None = None
        self._order: list[str] = []
        self._tallies: dict[str | None, _Tally] = {None: _Tally()}
        state = (*model.parameters(), *model.buffers())
        self._kept: dict[int, Tensor] = {_storage_key(t): t for t in state}
        self._parameter_keys = frozenset(_storage_key(p) for p in model.parameters())

    @property
    def order(self) -> tuple[str, ...]:
        """The atoms called by outer code, in order, with repetitions."""
        return tuple(self._order)

    def cost(self, name: str | None) -> AtomCost:
        """Returns an atom's cost without its parameters (None: outer code before the first)."""
        tally = self._tallies.get(name, _Tally())
        return AtomCost(**vars(tally))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Installs the hooks on the copy and this mode while the step runs."""
        handles: list[RemovableHandle] = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._enter_hook(name)))
            handles.append(module.register_forward_hook(self._leave_hook(name)))
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_hook(self, name: str) -> Any:
        def enter(_module: nn.Module, _args: Any) -> None:
            if not self._stack:
                self._order.append(name)
                self._tallies.setdefault(name, _Tally()).calls += 1
            self._stack.append(name)

        return enter

    def _leave_hook(self, name: str) -> Any:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self._stack.pop()
            if not self._stack:
                self._last = name
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                self._tallies[name].output_bytes = sum(nbytes(t) for t in tensors)

        return leave

    def _current(self) -> _Tally:
        return self._tallies[self._stack[0] if self._stack else self._last]

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in self._kept:
            # Kept alive so that its storage's address cannot be met again for another tensor.
            self._kept[key] = tensor
            self._current().saved_bytes += nbytes(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # a backward of the user's is not counted
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.namespace == COLLECTIVES:
            self._count_communication(func, args, out)
        if _is_free(func):
            return
        results = _tensors(out)
        operands = _tensors((args, kwargs))
        packet = func._overloadpacket
        counted = _ATEN._scaled_dot_product_flash_attention if packet is _CPU_ATTENTION else packet
        formula = flop_registry.get(counted)
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        moved = _moved_bytes(func, operands, results)
        tally = self._current()
        tally.flops += flops
        tally.moved_bytes += moved
        seconds = self._device.seconds(flops, moved)
        tally.forward_s += seconds
        tally.backward_s += self._backward_s(func, operands, flops, moved)

    def _count_communication(self, func: Any, args: Any, out: Any) -> None:
        """A collective of a distributed module; what comes back in the backward is as much."""
        seconds = communicated_bytes(func, args, out) / self._device.link_bytes_per_s
        tally = self._current()
        tally.forward_s += seconds
        if any(tensor.requires_grad for tensor in _tensors(args)):
            tally.backward_s += seconds

    def _backward_s(self, func: Any, operands: list[Tensor], flops: int, moved: int) -> float:
        """Each gradient wanted costs about the forward, a table's as much as writing it."""
        wanted = [t for t in operands if t.requires_grad]
        if not torch.is_grad_enabled() or not wanted:
            return 0.0
        parameters = [t for t in wanted if _storage_key(t) in self._parameter_keys]
        if func._overloadpacket in _GATHERS and parameters:
            return self._device.seconds(0, moved + sum(nbytes(p) for p in parameters))
        factor = min(2, bool(parameters) + len(wanted) - len(parameters))
        return factor * self._device.seconds(flops, moved)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_free(func: Any) -> bool:
    """True for views and bookkeeping: nothing is computed and nothing is moved."""
    if func._overloadpacket in flop_registry:
        return False
    is_arithmetic = func.namespace in ("aten", "prims")
    return not is_arithmetic or func.is_view or func._overloadpacket in _UNINITIALISED


def _moved_bytes(func: Any, operands: list[Tensor], results: list[Tensor]) -> int:
    written = sum(nbytes(t) for t in results)
    if func._overloadpacket in _GATHERS:  # reads what it writes, not the whole table
        return 2 * written
    return written + sum(nbytes(t) for t in operands)
