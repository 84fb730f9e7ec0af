"""What an operation on deferred tensors does: it is recorded, or done at once for its value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_smp.deferred.draws import default_generator, is_random
from lightning_smp.deferred.tape import (
    Buffer,
    Operation,
    Recording,
    Ref,
    ignores_self,
    keep,
    replay,
)
from lightning_smp.errors import UnsupportedError

__all__ = ["Held", "call", "held_of", "make"]

_ATEN = torch.ops.aten
_FILE = __file__.rpartition("record.py")[0]
_TURNS: Final = frozenset(
    {_ATEN.t_, _ATEN.transpose_, _ATEN.squeeze_, _ATEN.unsqueeze_, _ATEN.swapdims_, _ATEN.swapaxes_}
)  # they change a tensor's geometry only
_UNSUPPORTED_META: Final = (NotImplementedError, RuntimeError, TypeError, ValueError)
_HAS_NO_MEMORY: Final = (
    "Inside smp.delay_param_initialization tensors have no memory until the partition gives them "
    "some: do it after the first step, or build this part of the model outside of the context."
)

Wrap = Callable[[Tensor, Buffer], Tensor]


class Held:
    """What a deferred tensor consists of.

    Attributes:
        meta: a meta tensor of the same geometry; views of one buffer share its storage.
        buffer: the memory that it will be in.
    """

    __slots__ = ("buffer", "meta")

    def __init__(self, meta: Tensor, buffer: Buffer) -> None:
        self.meta = meta
        self.buffer = buffer

    def ref(self) -> Ref:
        """Its place in the buffer, now."""
        if self.buffer.is_settled:
            raise UnsupportedError(
                f"A view of {self.buffer.describe()} was used after the parameter got its values; "
                "it is not part of the module, so it has none. Take views of parameters when they "
                "are used, not when the model is built."
            )
        return Ref.of(self.meta, self.buffer)


def held_of(value: object) -> Held | None:
    """What a value consists of if it is a deferred tensor, else None."""
    return value.__dict__.get("_smp_held") if isinstance(value, Tensor) else None


def make(func: Any, args: Any, kwargs: Any, recording: Recording, wrap: Wrap) -> Any:
    """Runs a factory: its result is deferred, or real where it is empty or of another kind.

    Args:
        func: a factory of one tensor.
        args: as given, operands real.
        kwargs: likewise.
        recording: the context.
        wrap: makes the deferred tensor.
    """
    like = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    default = torch.device("cpu") if like is None else like.device
    device = torch.device(kwargs.get("device") or default)
    layout = kwargs.get("layout") or torch.strided
    if device.type == "meta" or layout is not torch.strided:
        return func(*args, **kwargs)
    metas, meta_kwargs = tree_map(_to_meta, (args, kwargs))
    meta = _without_generator(func)(*metas, **_on_meta(func, meta_kwargs))
    if meta.numel() == 0 or meta.layout is not torch.strided:
        return func(*args, **kwargs)
    kwargs = {**kwargs, "device": device}
    if any(argument.name == "dtype" for argument in func._schema.arguments):
        kwargs["dtype"] = meta.dtype
    kwargs.pop("pin_memory", None)
    buffer = _new_buffer(meta, device, recording)
    if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        ref_args, ref_kwargs = tree_map(_to_operand, (args, kwargs))
        _append(func, ref_args, ref_kwargs, (), ((0, Ref.of(meta, buffer)),), device)
        _skip_draw(func, args, kwargs, meta, recording, device)
    return wrap(meta, buffer)


def call(func: Any, args: Any, kwargs: Any, wrap: Wrap) -> Any:
    """Runs an operation with deferred operands.

    It is recorded, with deferred results, if it can be. It is done at once, on values made for it
    and freed afterwards, if Python or a real tensor needs what it gives.

    Raises:
        UnsupportedError: it needs memory that does not exist, or trains a deferred parameter.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    held = [h for h in map(held_of, tensors) if h is not None]
    is_active = any(h.buffer.recording.is_active for h in held)
    if not is_active:
        _check_not_training(func, tensors, held)
    written = _written(func, args, kwargs)
    if any(held_of(tensor) is None for tensor in written):
        return _at_once(func, args, kwargs)
    if not is_active and not written and len(held) < len(tensors) and not func.is_view:
        return _at_once(func, args, kwargs)  # outside of the context it is a use, not a recipe
    if torch.Tag.inplace_view in func.tags:
        return _turn(func, args, kwargs)
    return _record(func, args, kwargs, written, held, wrap)


def _record(
    func: Any, args: Any, kwargs: Any, written: Sequence[Tensor], held: Sequence[Held], wrap: Wrap
) -> Any:
    device = held[0].buffer.device
    generator = _generator(kwargs, device) if is_random(func) else None
    before = None if generator is None else generator.get_state()
    ref_args, ref_kwargs = tree_map(_to_operand, (args, kwargs))
    metas, meta_kwargs = tree_map(_to_meta, (args, kwargs))
    try:
        out = _without_generator(func)(*metas, **_on_meta(func, meta_kwargs))
    except _UNSUPPORTED_META:
        # It depends on values, or is wrong: then doing it raises what the user should see.
        out = _at_once(func, args, kwargs)
        if not written:
            return out
        _append(func, ref_args, ref_kwargs, written, (), device, before)
        return _given_back(func, written)
    flat, spec = tree_flatten(out)
    if any(isinstance(leaf, Tensor) and leaf.is_complex() and leaf.is_conj() for leaf in flat):
        return _at_once(func, args, kwargs)
    known = {_storage_id(h.meta): h.buffer for h in held}
    results, wrapped = _wrap_results(flat, args, known, kwargs.get("device") or device, held, wrap)
    if results or written:
        _append(func, ref_args, ref_kwargs, written, results, device, before)
    if generator is not None:
        filled = next(leaf for leaf in flat if isinstance(leaf, Tensor))
        _skip_draw(func, args, kwargs, filled, held[0].buffer.recording, device)
    gives_new = any(r.alias_info is None for r in func._schema.returns)
    return tree_unflatten(wrapped, spec) if gives_new or not written else _given_back(func, written)


def _wrap_results(
    flat: list[Any],
    args: Any,
    known: dict[int, Buffer],
    device: Any,
    held: Sequence[Held],
    wrap: Wrap,
) -> tuple[tuple[tuple[int, Ref], ...], list[Any]]:
    """New buffers for results that are no views; returns their refs and all results wrapped."""
    results: list[tuple[int, Ref]] = []
    wrapped: list[Any] = []
    for place, meta in enumerate(flat):
        if not isinstance(meta, Tensor):
            wrapped.append(meta)
            continue
        buffer = known.get(_storage_id(meta))
        if buffer is None:
            buffer = _new_buffer(meta, torch.device(device), held[0].buffer.recording)
            known[_storage_id(meta)] = buffer
            results.append((place, Ref.of(meta, buffer)))
        wrapped.append(wrap(meta, buffer))
    return tuple(results), wrapped


def _append(
    func: Any,
    args: Any,
    kwargs: Any,
    written: Sequence[Tensor],
    results: tuple[tuple[int, Ref], ...],
    device: torch.device,
    state: Tensor | None = None,
) -> None:
    """Puts an operation into the lists of the buffers that it makes or writes."""
    if state is None and is_random(func):
        state = _generator(kwargs, device).get_state()
    if state is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        func = _without_generator(func)
    targets = {held.buffer for held in map(held_of, written) if held is not None}
    targets |= {ref.buffer for _, ref in results}
    operands = {leaf.buffer for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref)}
    time = 1 + max(buffer.time for buffer in operands | targets)
    operation = Operation(
        func, args, kwargs, results, time, device, state, torch.get_default_dtype()
    )
    for buffer in operands | targets:
        buffer.time = time
    for ref in operation.reads():
        if targets != {ref.buffer}:
            ref.buffer.is_read = True
    for buffer in targets:
        if not buffer.is_read and operation.overwrites(buffer):
            buffer.operations.clear()
        buffer.operations.append(operation)


def _skip_draw(
    func: Any, args: Any, kwargs: Any, result: Tensor, recording: Recording, device: torch.device
) -> None:
    """Moves the generator on as the operation would have: blockwise, or by doing it once."""
    if not is_random(func):
        return
    if not recording.draws.skip(func, result, _generator(kwargs, device)):
        _at_once(func, args, kwargs)


def _at_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Does an operation for real on values made for it."""
    flat, spec = tree_flatten((args, kwargs))
    refs: list[Ref | None] = []
    for place, leaf in enumerate(flat):
        held = held_of(leaf)
        is_filled = place == 0 and ignores_self(func)
        refs.append(None if held is None or is_filled else held.ref())
    storages = replay([ref for ref in refs if ref is not None])
    real = [
        _value(leaf) if ref is None else ref.in_storage(storages[ref.buffer])
        for leaf, ref in zip(flat, refs, strict=True)
    ]
    del storages
    real_args, real_kwargs = tree_unflatten(real, spec)
    with torch.no_grad():
        return func(*real_args, **real_kwargs)


def _value(leaf: Any) -> Any:
    """A real leaf as it is; for a deferred one that is overwritten, memory."""
    held = held_of(leaf)
    if held is None:
        return leaf
    meta = held.meta
    return torch.empty_strided(
        meta.size(), meta.stride(), dtype=meta.dtype, device=held.buffer.device
    )


def _turn(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that changes the geometry of its operand in place."""
    target, held = args[0], held_of(args[0])
    assert held is not None
    if func is _ATEN.set_.source_Tensor:
        source = held_of(args[1])
        if source is not None:
            target.__dict__["_smp_held"] = Held(source.meta.detach(), source.buffer)
            return _same_geometry(target, source.meta)
    if func._overloadpacket not in _TURNS:
        raise UnsupportedError(f"{func} on {held.buffer.describe()}. {_HAS_NO_MEMORY}")
    func(held.meta, *args[1:], **kwargs)
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    return target


def _same_geometry(target: Tensor, meta: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch():
        target.as_strided_(meta.size(), meta.stride(), meta.storage_offset())
    return target


def _check_not_training(func: Any, tensors: Sequence[Tensor], held: Sequence[Held]) -> None:
    if not torch.is_grad_enabled() or func.is_view:
        return
    if any(held_of(tensor) is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(
            f"{func} uses {held[0].buffer.describe()} before it has values. Parameters made under "
            "smp.delay_param_initialization get them at the first step of Trainer(strategy='smp') "
            "or of an @smp.step function: call the model there, or build it without the context."
        )


def _generator(kwargs: Any, device: torch.device) -> torch.Generator:
    given = kwargs.get("generator")
    return default_generator(device) if given is None else given


def _without_generator(func: Any) -> Any:
    """The overload that draws from the default generator, which a replay sets to the state."""
    name = func._overloadname
    if name not in ("generator", "generator_with_names", "generator_out"):
        return func
    return func._overloadpacket.default


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    written: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def _given_back(func: Any, written: Sequence[Tensor]) -> Any:
    """What an operation that writes its operands returns: them, or nothing."""
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _on_meta(func: Any, kwargs: Any) -> dict[str, Any]:
    """The keyword arguments for a run on meta tensors."""
    changed = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    arguments = func._schema.arguments
    if any(argument.name == "device" for argument in arguments):
        has_operand = isinstance(arguments[0].type, torch.TensorType)
        if not has_operand or changed.get("device") is not None:
            changed["device"] = torch.device("meta")
    return changed


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    held = held_of(leaf)
    if held is not None:
        return held.meta
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _to_operand(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    held = held_of(leaf)
    return keep(leaf) if held is None else held.ref()


def _new_buffer(meta: Tensor, device: torch.device, recording: Recording) -> Buffer:
    return Buffer(device, meta.untyped_storage().nbytes(), recording, _site())


def _storage_id(meta: Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def _site() -> str:
    """File and line outside of torch and this package that is running."""
    frame = sys._getframe(1)
    torch_folder = torch.__file__.rpartition("__init__")[0]
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_FILE, torch_folder)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
