"""The tape: what was done to memory that does not exist yet, and doing it.

Note [What is recorded]
A `Buffer` stands for a storage; a `Ref` is a tensor in it. Views are refs of one buffer and are not
recorded. An `Operation` that writes a buffer is kept in the buffer's list. Its time is above the
time of every buffer that it touches (a Lamport clock), so sorting by time repeats any set of
operations in an order in which each sees what it saw when it was recorded. Replaying a buffer takes
its own operations, back to the last one that overwrites all of it, and of every other buffer that
these read what happened to it before. Operands that were real then are kept: small ones as copies,
large ones as they are, with their version, so that a later change is refused and not replayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lightning_smp.deferred.draws import Draws, from_state
from lightning_smp.errors import UnsupportedError

__all__ = [
    "Buffer",
    "Operand",
    "Operation",
    "Recording",
    "Ref",
    "default_dtype",
    "ignores_self",
    "keep",
    "needed",
    "replay",
]

_ATEN = torch.ops.aten
_COPIED_BYTES: Final = 64 * 2**10

_FILLS: Final = frozenset(
    packet
    for packet in (
        *(_ATEN.zero_, _ATEN.fill_, _ATEN.copy_, _ATEN.normal_, _ATEN.uniform_),
        *(_ATEN.exponential_, _ATEN.cauchy_, _ATEN.log_normal_, _ATEN.geometric_, _ATEN.random_),
    )
)


@dataclass
class Recording:
    """One context under which tensors are deferred.

    Attributes:
        is_active: whether the context is open.
        draws: leaves out random draws.
    """

    is_active: bool = True
    draws: Draws = field(default_factory=Draws)


@dataclass(eq=False)
class Buffer:
    """A storage that does not exist yet.

    Attributes:
        device: where it is made.
        num_bytes: its size.
        recording: the context it was made under.
        site: file and line that made it.
        name: the parameter that it became, for messages.
        operations: what writes it, in order; none: it is uninitialised.
        time: when it was last touched.
        is_read: whether another buffer's contents depend on what it once held.
        is_settled: whether it has been given its values: refs that were left over are stale.
    """

    device: torch.device
    num_bytes: int
    recording: Recording
    site: str
    name: str | None = None
    operations: list[Operation] = field(default_factory=list)
    time: int = 0
    is_read: bool = False
    is_settled: bool = False

    def describe(self) -> str:
        """Names it for a message."""
        name = "a deferred tensor" if self.name is None else f"deferred parameter {self.name!r}"
        return f"{name} (made at {self.site})"


@dataclass(frozen=True)
class Ref:
    """A tensor in a buffer."""

    buffer: Buffer
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, meta: Tensor, buffer: Buffer) -> Ref:
        """The ref of a meta tensor whose storage stands for the buffer's."""
        return cls(
            buffer, meta.dtype, tuple(meta.size()), tuple(meta.stride()), int(meta.storage_offset())
        )

    def is_dense(self) -> bool:
        """Whether it has every element between its first and its last exactly once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    def covers_buffer(self) -> bool:
        """Whether it has every element of the buffer exactly once."""
        num_bytes = math.prod(self.size) * self.dtype.itemsize
        return self.is_dense() and num_bytes == self.buffer.num_bytes

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in the real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operand:
    """A real tensor that a recorded operation reads."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        """The tensor, which must not have changed.

        Raises:
            UnsupportedError: it was modified after it was recorded.
        """
        if self.tensor._version != self.version:
            raise UnsupportedError(
                f"A tensor of shape {list(self.tensor.shape)} was used to initialise a deferred "
                "parameter and was modified afterwards, before the parameter got its values. Use "
                "a copy of it (tensor.clone()) in the initialisation."
            )
        return self.tensor


def keep(tensor: Tensor) -> Operand:
    """Keeps a real operand: a copy if it is small, else itself with its version."""
    if tensor.numel() * tensor.element_size() <= _COPIED_BYTES:
        tensor = tensor.detach().clone()
    return Operand(tensor, tensor._version)


@dataclass(frozen=True, eq=False)
class Operation:
    """A recorded operation.

    Attributes:
        func: the aten overload.
        args: its arguments; tensors are `Ref` or `Operand`.
        kwargs: likewise.
        results: place among the flattened results and ref of those with a new buffer.
        time: its place in the order.
        device: the device whose default generator it draws from.
        state: of that generator, before; None if it draws nothing.
        default_dtype: torch's default dtype when it was recorded.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, Ref], ...]
    time: int
    device: torch.device
    state: Tensor | None
    default_dtype: torch.dtype

    def reads(self) -> list[Ref]:
        """The refs among its arguments whose contents matter."""
        refs = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]
        return refs[1:] if ignores_self(self.func) and isinstance(self.args[0], Ref) else refs

    def touches(self) -> set[Buffer]:
        """Every buffer that it needs to be there, or makes."""
        refs = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]
        return {ref.buffer for ref in (*refs, *(ref for _, ref in self.results))}

    def overwrites(self, buffer: Buffer) -> bool:
        """Whether nothing of what the buffer held before is left."""
        if any(ref.buffer is buffer for _, ref in self.results):
            return True
        if not ignores_self(self.func):
            return False
        target = self.args[0]
        if not (isinstance(target, Ref) and target.buffer is buffer and target.covers_buffer()):
            return False
        return not any(ref.buffer is buffer for ref in self.reads())


def ignores_self(func: Any) -> bool:
    """Whether an in-place operation replaces what its first operand held."""
    return func._overloadpacket in _FILLS


def replay(refs: Sequence[Ref]) -> dict[Buffer, torch.UntypedStorage]:
    """Makes the storages of refs, as the buffers are now. Other memory is freed on the way."""
    wanted = {ref.buffer for ref in refs}
    operations = needed(wanted)
    last_use: dict[Buffer, int] = {}
    for index, operation in enumerate(operations):
        last_use.update(dict.fromkeys(operation.touches(), index))
    storages: dict[Buffer, torch.UntypedStorage] = {}
    with torch.no_grad(), torch.inference_mode(mode=False), _disable_current_modes():
        for index, operation in enumerate(operations):
            _execute(operation, storages)
            for buffer in operation.touches():
                if last_use[buffer] == index and buffer not in wanted:
                    storages.pop(buffer, None)
        for buffer in wanted:
            _storage(buffer, storages)
    return storages


def needed(wanted: Iterable[Buffer], before: float = math.inf) -> list[Operation]:
    """Returns the operations that make buffers what they are, or were at a time, in order."""
    found: set[Operation] = set()
    pending: set[tuple[Buffer, float]] = {(buffer, before) for buffer in wanted}
    seen: set[tuple[Buffer, float]] = set()
    while pending:
        buffer, end = pending.pop()
        seen.add((buffer, end))
        for operation in reversed(buffer.operations):
            if operation.time >= end:
                continue
            found.add(operation)
            reads = {(ref.buffer, operation.time) for ref in operation.reads()}
            pending |= {read for read in reads if read[0] is not buffer} - seen
            if operation.overwrites(buffer):
                break
    return sorted(found, key=lambda operation: operation.time)


def _execute(operation: Operation, storages: dict[Buffer, torch.UntypedStorage]) -> None:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return leaf.in_storage(_storage(leaf.buffer, storages))
        return leaf.value() if isinstance(leaf, Operand) else leaf

    args, kwargs = tree_map(real, (operation.args, operation.kwargs))
    state = operation.state
    drawing = nullcontext() if state is None else from_state(operation.device, state)
    with drawing, default_dtype(operation.default_dtype):
        flat = tree_leaves(operation.func(*args, **kwargs))
    for place, ref in operation.results:
        storages[ref.buffer] = _as_recorded(flat[place], ref)


def _as_recorded(result: Tensor, ref: Ref) -> torch.UntypedStorage:
    """The result's storage, laid out as its meta kernel said."""
    same = (
        tuple(result.stride()) == ref.stride
        and result.storage_offset() == ref.offset
        and result.untyped_storage().nbytes() == ref.buffer.num_bytes
    )
    if same:
        return result.untyped_storage()
    storage = _empty_storage(ref.buffer)
    ref.in_storage(storage).copy_(result)
    return storage


def _storage(buffer: Buffer, storages: dict[Buffer, torch.UntypedStorage]) -> torch.UntypedStorage:
    if buffer not in storages:
        storages[buffer] = _empty_storage(buffer)
    return storages[buffer]


def _empty_storage(buffer: Buffer) -> torch.UntypedStorage:
    empty = torch.empty(buffer.num_bytes, dtype=torch.uint8, device=buffer.device)
    return empty.untyped_storage()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Lets torch's default dtype be another one for a while."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
