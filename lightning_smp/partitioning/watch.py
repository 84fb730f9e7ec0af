"""What each atom does: a watch over operations and memory of one fake step, forward and backward.

Nothing here knows of stages or devices.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lightning_smp.partitioning.costs import Work
from lightning_smp.partitioning.device import Kernel
from lightning_smp.partitioning.grouped import GROUPED, grouped_result
from lightning_smp.partitioning.operations import kernel_of, nbytes, storage_key, tensors_in

__all__ = ["CostWatch"]

_LEAF = "torch::autograd::AccumulateGrad"


@dataclass
class _Tally:
    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    presumed: list[Kernel] = field(default_factory=list)
    calls: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    base: int = 0  # bytes that others have saved
    highest: int = 0  # bytes that lived in a forward beyond the base
    temporary_bytes: int = 0  # bytes that lived in a backward beyond what was saved
    is_returning: bool = False


class CostWatch(TorchDispatchMode):
    """Counts the operations of a fake step and attributes them to the atom in which they run.

    Work of outer code goes to the atom that finished last, since a placed operation runs where its
    latest operand lives; before the first atom it goes to none (``None``). A backward's operations
    go where the forward's did that autograd answers with them.

    Args:
        model: The (copied) root; its parameters and buffers are never activations.
        modules: The (copied) module of each atom, by name.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._stack: list[str] = []
        self._last: str | None = None
        self._order: list[str] = []
        self._tallies: dict[str | None, _Tally] = {None: _Tally()}
        self._memory = _Memory(model)
        self._saved_bytes = 0
        self._first_numbers: list[int] = []  # of autograd's, where the atom in `_owners` begins
        self._owners: list[str | None] = []
        self._recomputed: dict[int, str] = {}  # the atom, by the number of what recomputes it
        self._had_backward = False
        self._met_real = False

    @property
    def order(self) -> tuple[str, ...]:
        """The atoms called by outer code, in order, with repetitions."""
        return tuple(self._order)

    @property
    def awaits_backward(self) -> bool:
        """Whether none was watched that reached a parameter, and one would reach no real tensor."""
        return not self._had_backward and not self._met_real

    def forget_backward(self) -> None:
        """The backward failed: it is presumed instead."""
        self._had_backward = False

    def work(self, name: str | None) -> Work:
        """Return an atom's work (None: outer code before the first).

        Where no backward was watched, each product is presumed to come back twice, as the gradients
        of its two factors, and everything else once.
        """
        tally = self._tallies.get(name, _Tally())
        return Work(
            tuple(tally.forward),
            tuple(tally.backward if self._had_backward else tally.presumed),
            tally.calls, tally.output_bytes, tally.saved_bytes,
            max(tally.temporary_bytes, tally.highest - tally.saved_bytes),
        )  # fmt: skip

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
            if _is_in_backward():
                self._own(name)
                node: Any = torch._C._current_autograd_node()
                self._recomputed = {node._sequence_nr(): name}
                return
            if not self._stack:
                self._order.append(name)
                self._tallies.setdefault(name, _Tally()).calls += 1
                self._begin(name)
            self._stack.append(name)

        return enter

    def _leave_hook(self, name: str) -> Any:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if _is_in_backward():
                return
            self._stack.pop()
            if not self._stack:
                self._last = name
                self._tallies[name].output_bytes = sum(map(nbytes, tensors_in(output)))

        return leave

    def _begin(self, name: str | None) -> None:
        """An atom's forward begins."""
        self._own(name)
        tally = self._tallies[name]
        tally.base = self._saved_bytes - tally.saved_bytes

    def _own(self, name: str | None) -> None:
        """What autograd numbers from now on is an atom's."""
        self._first_numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(name)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not _is_in_backward() and self._memory.save(tensor):
            size = tensor.untyped_storage().nbytes()
            self._current().saved_bytes += size
            self._saved_bytes += size
        return tensor

    def _current(self) -> _Tally:
        return self._tallies[self._stack[0] if self._stack else self._last]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        is_grouped = func._overloadpacket is GROUPED
        out = grouped_result(*args, **kwargs) if is_grouped else func(*args, **kwargs)
        if func.namespace != "prim":  # questions about tensors
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operands = tensors_in((args, kwargs))
        self._memory.add(tensors_in(out), operands)
        kernel = kernel_of(func, args, kwargs, out)
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            self._count_backward(node, operands, kernel)
            return
        tally = self._current()
        tally.highest = max(tally.highest, self._memory.live - tally.base)
        self._met_real |= any(
            tensor.requires_grad and not isinstance(tensor, FakeTensor) for tensor in operands
        )
        if kernel is not None:
            tally.forward.append(kernel)
            tally.presumed += [kernel] * self._presumed_gradients(kernel, operands)

    def _count_backward(self, node: Any, operands: list[Tensor], kernel: Kernel | None) -> None:
        if node.name() == _LEAF:  # what it is given is a parameter's gradient from now on
            self._had_backward = True
            for tensor in operands:
                self._memory.disown(tensor)
            return
        tally = self._tallies[self._owner(node._sequence_nr())]
        if not tally.is_returning:
            tally.is_returning = True
            tally.base, self._saved_bytes = self._saved_bytes, self._saved_bytes - tally.saved_bytes
        tally.temporary_bytes = max(tally.temporary_bytes, self._memory.live - tally.base)
        if kernel is not None:
            tally.backward.append(kernel)

    def _owner(self, number: int) -> str | None:
        """The atom whose forward made a node of the graph."""
        if number in self._recomputed:
            return self._recomputed[number]
        at = bisect.bisect_right(self._first_numbers, number) - 1
        return self._owners[at] if at >= 0 else None

    def _presumed_gradients(self, kernel: Kernel, operands: list[Tensor]) -> int:
        wanted = sum(tensor.requires_grad for tensor in operands if tensor.dim() > 1)
        if not wanted or not torch.is_grad_enabled():
            return 0
        return min(2, wanted) if kernel.flops else 1


class _Memory:
    """The storages that operations made and that still exist."""

    def __init__(self, model: nn.Module) -> None:
        self.live = 0
        self._sizes = {storage_key(t): 0 for t in (*model.parameters(), *model.buffers())}
        self._references: dict[int, Any] = {}
        self._saved = set(self._sizes)

    def add(self, results: list[Tensor], operands: list[Tensor]) -> None:
        """Counts what an operation made."""
        given = {storage_key(tensor) for tensor in operands}
        for tensor in results:
            key = storage_key(tensor)
            if key not in self._sizes and key not in given:
                self._follow(key, tensor.untyped_storage())

    def _follow(self, key: int, storage: torch.UntypedStorage) -> None:
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self._references[key] = weakref.ref(storage, lambda _: self._free(key))

    def save(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves was neither a parameter nor saved already."""
        key = storage_key(tensor)
        is_new = key not in self._saved
        self._saved.add(key)
        if key not in self._sizes:  # the batch's
            self._follow(key, tensor.untyped_storage())
        return is_new

    def disown(self, tensor: Tensor) -> None:
        """A storage is no activation any more."""
        key = storage_key(tensor)
        self.live -= self._sizes.get(key, 0)
        self._sizes[key] = 0

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._saved.discard(key)
        del self._references[key]


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
