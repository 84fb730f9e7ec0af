"""The deferred tensor: shape, dtype and device of a tensor, and the record of how it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_smp.deferred.record import Held, call, held_of
from lightning_smp.deferred.tape import Buffer, replay
from lightning_smp.errors import UnsupportedError

__all__ = ["DeferredTensor", "become", "real_value", "wrap"]


class DeferredTensor(Tensor):
    """A tensor (or parameter) that has no memory yet. Made under `deferring` only."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What Python asks of a tensor beside operations."""
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Records an operation, or does it."""
        return call(func, args, kwargs or {}, wrap)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = self.detach().clone()
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            if name != "_smp_held":
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_memory(self, "saving or copying it")


def wrap(meta: Tensor, buffer: Buffer) -> Tensor:
    """Returns the deferred tensor at a place in a buffer."""
    tensor: Tensor = Tensor._make_wrapper_subclass(
        DeferredTensor, meta.size(), strides=meta.stride(), storage_offset=meta.storage_offset(),
        dtype=meta.dtype, device=buffer.device,
    )  # fmt: skip
    tensor.__dict__["_smp_held"] = Held(meta, buffer)
    return tensor


def real_value(tensor: Tensor) -> Tensor:
    """Returns what a deferred tensor will be, in memory of its own."""
    held = held_of(tensor)
    assert held is not None
    ref = held.ref()
    with torch.no_grad():
        value = ref.in_storage(replay([ref])[ref.buffer])
        # The rest of a larger memory is freed, where that does not change the strides.
        return value.clone() if ref.is_dense() and not ref.covers_buffer() else value


def become(tensor: Tensor, data: Tensor) -> None:
    """Makes a tensor hold other data; the object, and whatever refers to it, stays.

    Keeps `requires_grad`, Python attributes and whether it is a parameter; `data` may be of another
    device, dtype or kind (real, meta or deferred). What was computed with gradients is cut from its
    graph: modules that keep such a tensor (`weight_norm`) compute it anew in their forward.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    attributes = {k: v for k, v in tensor.__dict__.items() if k not in ("_smp_held", "_is_param")}
    with torch.no_grad():
        fresh = (
            nn.Parameter(data, requires_grad=tensor.requires_grad)
            if is_parameter
            else data.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)
        )
    fresh.__dict__.update(attributes)
    _exchange(tensor, fresh)


def _exchange(tensor: Tensor, fresh: Tensor) -> None:
    """`torch.utils.swap_tensors` without its refusal of weak references.

    They refer to the object, which is to be the same parameter as before (LSTMs keep some).
    """
    if tensor._use_count() > 1:  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"{tensor!r} is part of an autograd graph, so it cannot be given other data. Compute "
            "what depends on it under torch.no_grad(), or after the first step."
        )
    hooks, late_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    for name in ("__class__", "__dict__"):
        own = getattr(tensor, name)
        setattr(tensor, name, getattr(fresh, name))
        setattr(fresh, name, own)
    torch._C._swap_tensor_impl(tensor, fresh)
    if hooks:
        tensor._backward_hooks = hooks
    if late_hooks:
        tensor._post_accumulate_grad_hooks = late_hooks


def _get_data(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach()


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if held_of(tensor) is None:  # a real tensor is given deferred data
        tensor.data = real_value(value)
        return
    become(tensor, value)


def _tolist(tensor: Tensor) -> Any:
    return real_value(tensor).tolist()


def _numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    array = real_value(tensor).numpy()
    array.flags.writeable = False  # what is written would be lost
    return array


def _array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return real_value(tensor).__array__(*args, **kwargs)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        raise _no_memory(tensor, what)

    return refuse


def _no_memory(tensor: Tensor, what: str) -> UnsupportedError:
    held = held_of(tensor)
    name = "a deferred tensor" if held is None else held.buffer.describe()
    return UnsupportedError(
        f"{what} was asked of {name}, which has no memory until the partition gives it some. Do it "
        "after the first step, or build this part of the model outside of "
        "smp.delay_param_initialization."
    )


_SPECIAL: Final[dict[Any, Callable[..., Any]]] = {
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.data_ptr: _refuse("data_ptr()"),
    Tensor.untyped_storage: _refuse("untyped_storage()"),
    Tensor.storage: _refuse("storage()"),
    Tensor.share_memory_: _refuse("share_memory_()"),
}
