"""Copies of a module and of a batch whose tensors are fake: no storage, no side effects.

Everything becomes a fake *cpu* tensor, wherever the original lives: autograd on a fake cuda tensor
aborts the process on a CPU build of torch, and costs do not depend on the device here.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from lightning_smp.errors import UnsupportedError
from lightning_smp.partitioning.atoms import is_boundary, is_lightning_module

__all__ = ["fake_batch", "fake_copy", "fake_tensor", "new_fake_mode", "preserved_random_state"]

_SHARED_ATTRIBUTES = ("_trainer", "_fabric", "_fabric_optimizers")
# What is too large to copy, or cannot be: steps read it, they do not write it.
_SHARED_TYPES = (
    *(Dataset, DataLoader, torch.Generator, ModuleType),
    *(type(threading.Lock()), type(threading.RLock())),
)
_MAX_DEPTH = 4


def new_fake_mode() -> FakeTensorMode:
    """Returns a mode for one analysis; real tensors met in the user's code become fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Returns a fake cpu tensor of the same shape, strides, dtype, and kind (parameter or not)."""
    if is_lazy(tensor):
        raise UnsupportedError(
            "The model cannot be analysed: it has an uninitialised lazy parameter. Run one batch "
            "through it before training, or give its sizes instead of using a Lazy module."
        )
    with torch.inference_mode(mode=False), mode:  # an inference tensor could not be trained on
        if tensor.layout is torch.strided:
            fake = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        else:
            fake = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Returns the batch with every tensor replaced by a fake one; other leaves are kept.

    Looks into everything that pytree knows, and into mappings and dataclasses it does not know.
    """
    return tree_map(lambda leaf: _fake_leaf(leaf, mode, _MAX_DEPTH), batch)


def _fake_leaf(leaf: Any, mode: FakeTensorMode, depth: int) -> Any:
    if isinstance(leaf, FakeTensor) or depth == 0:
        return leaf
    if isinstance(leaf, Tensor):
        return fake_tensor(leaf, mode)

    def recurse(value: Any) -> Any:
        return tree_map(lambda inner: _fake_leaf(inner, mode, depth - 1), value)

    if isinstance(leaf, MutableMapping):
        return _fake_mapping(leaf, recurse)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return _fake_dataclass(leaf, recurse)
    return leaf


def _fake_mapping(leaf: MutableMapping[Any, Any], recurse: Callable[[Any], Any]) -> Any:
    clone = copy.copy(leaf)
    if isinstance(leaf, UserDict):
        vars(clone)["data"] = dict(leaf.data)  # tokenizers' subclasses share it when copied
    for key, value in leaf.items():
        clone[key] = recurse(value)
    return clone


def _fake_dataclass(leaf: Any, recurse: Callable[[Any], Any]) -> Any:
    clone = copy.copy(leaf)
    for item in fields(leaf):
        object.__setattr__(clone, item.name, recurse(getattr(leaf, item.name)))
    return clone


def fake_copy(root: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a deep copy of a module with fake tensors that cannot touch the original.

    The trainer, Fabric, data sets, loaders, generators and locks are shared with the original, not
    copied. On the copy, metrics are silent, and what a LightningModule does to the outside (logs,
    loggers, optimizers, gathers) does nothing.

    Raises:
        UnsupportedError: The module has lazy parameters.
        Exception: Whatever an attribute raises that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in root.modules():
        _remember(module, memo, mode)
    clone: nn.Module = copy.deepcopy(root, memo)
    for original in root.modules():
        copied = memo.get(id(original))
        if copied is not None and not is_boundary(original):
            _reconnect(original, copied)
    return clone


def _reconnect(original: nn.Module, copied: nn.Module) -> None:
    for name in _SHARED_ATTRIBUTES:
        if name in vars(original):  # LightningModule drops its trainer when it is copied
            vars(copied)[name] = vars(original)[name]
    if isinstance(vars(copied).get("_device"), torch.device):
        vars(copied)["_device"] = torch.device("cpu")
    if is_lightning_module(original):
        _disconnect(original, copied)


def _remember(module: nn.Module, memo: dict[int, Any], mode: FakeTensorMode) -> None:
    """Decides what the deep copy finds in place of a module's tensors and trainer, or of itself."""
    if is_boundary(module):
        is_collection = isinstance(module, nn.ModuleDict)
        memo[id(module)] = _SilentCollection() if is_collection else _SilentMetric()
        return
    for value in vars(module).values():
        _remember_value(value, memo, mode, _MAX_DEPTH)
    for name in _SHARED_ATTRIBUTES:
        value = vars(module).get(name)
        if value is not None:
            memo[id(value)] = value


def _remember_value(value: Any, memo: dict[int, Any], mode: FakeTensorMode, depth: int) -> None:
    if id(value) in memo or depth == 0:
        return
    if isinstance(value, Tensor):
        memo[id(value)] = fake_tensor(value, mode)
    elif isinstance(value, _SHARED_TYPES):
        memo[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            _remember_value(item, memo, mode, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _remember_value(item, memo, mode, depth - 1)


class _Nothing:
    """Absorbs every use: attributes, calls and context managers lead to itself again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_args: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _key: object) -> Any:
        return self

    def __setitem__(self, _key: object, _value: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False


class _SilentOptimizer(_Nothing):
    """Updates nothing, but runs a closure, which may be where the user's forward is."""

    def step(self, closure: Callable[[], Any] | None = None, **_kwargs: object) -> Any:
        return closure() if closure is not None else None


class _SilentMetric(nn.Module):
    """Stands for a metric or a collection of metrics: counts nothing, its values are zero."""

    def forward(self, *_args: object, **_kwargs: object) -> Any:
        return self.compute()

    def compute(self) -> Any:
        return torch.zeros(())

    def __getattr__(self, name: str) -> Any:
        return _Nothing()

    def __getitem__(self, _key: object) -> Any:
        return self


class _SilentCollection(_SilentMetric):
    def compute(self) -> Any:
        return {}


def _like_optimizers(optimizers: Any) -> Any:
    if isinstance(optimizers, list):
        return [_SilentOptimizer() for _ in optimizers]
    return _SilentOptimizer()


def _disconnect(original: nn.Module, copied: nn.Module) -> None:
    """Gives the copied LightningModule a class whose ways to the outside do nothing.

    A subclass, because loggers are properties, which an instance cannot replace.
    """
    nothing = _Nothing()

    def ignore(_self: Any, *_args: object, **_kwargs: object) -> Any:
        return nothing

    def optimizers(_self: Any, use_pl_optimizer: bool = True) -> Any:
        return _like_optimizers(original.optimizers(use_pl_optimizer))  # type: ignore[operator]

    def lr_schedulers(_self: Any) -> Any:
        return _like_optimizers(original.lr_schedulers())  # type: ignore[operator]

    def all_gather(self: Any, data: Any, *_args: object, **_kwargs: object) -> Any:
        size = self.trainer.world_size
        return tree_map(
            lambda leaf: torch.stack([leaf] * size) if isinstance(leaf, Tensor) else leaf, data
        )

    silent = ("log", "log_dict", "print", "manual_backward", "backward", "toggle_optimizer",
              "untoggle_optimizer", "toggled_optimizer", "clip_gradients")  # fmt: skip
    overrides: dict[str, Any] = dict.fromkeys(silent, ignore)
    overrides.update(optimizers=optimizers, lr_schedulers=lr_schedulers, all_gather=all_gather)
    overrides.update(logger=property(ignore), loggers=property(ignore))
    cls = type(copied)
    copied.__class__ = type(cls.__name__, (cls,), {**overrides, "__module__": cls.__module__})


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restores the states of torch's, Python's and NumPy's generators on exit."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
