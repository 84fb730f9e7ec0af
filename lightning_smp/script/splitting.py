"""Cutting the arguments of a step function into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_smp.batch_tree import Child, children_of, rebuild
from lightning_smp.errors import ConfigError

__all__ = ["Call", "Splitter"]

_CONTAINERS = (list, tuple, set, frozenset, Mapping)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Splitter:
    """Cuts calls of one function.

    Tensors, directly or in lists, tuples, dicts and sets, are cut into equal views along their
    axis; objects with ``smp_slice(num_mb, mb, axis)`` cut themselves. Everything else is passed
    through: models, optimizers, numbers, strings, tensors without dimensions.

    Args:
        function: the step function.
        whole: names of arguments that are passed through.
        axes: split axis by name of an argument, 0 for all others.

    Raises:
        ConfigError: the function has no argument of such a name, or an axis is no int.
    """

    def __init__(
        self, function: Callable[..., Any], whole: Collection[str], axes: Mapping[str, int]
    ) -> None:
        self._signature = inspect.signature(function)
        self._name = getattr(function, "__qualname__", repr(function))
        self._whole = frozenset([whole] if isinstance(whole, str) else whole)
        self._axes = dict(axes)
        self._check_names()

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[Call]:
        """Returns the arguments of each of ``count`` calls.

        Raises:
            ConfigError: a tensor cannot be cut into equal parts; names the nearest sizes.
            TypeError: the function cannot be called with these arguments.
        """
        bound = self._signature.bind(*args, **kwargs)
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, value in bound.arguments.items():
            for part, piece in zip(parts, self._split_argument(name, value, count), strict=True):
                part[name] = piece
        calls = []
        for part in parts:
            piece = inspect.BoundArguments(self._signature, part)
            calls.append(Call(piece.args, dict(piece.kwargs)))
        return calls

    def _split_argument(self, name: str, value: Any, count: int) -> list[Any]:
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD and name not in self._whole:
            columns = {key: self._split_named(key, item, count) for key, item in value.items()}
            return [{key: column[m] for key, column in columns.items()} for m in range(count)]
        return self._split_named(name, value, count)

    def _split_named(self, name: str, value: Any, count: int) -> list[Any]:
        if name in self._whole or count == 1:
            return [value] * count
        return self._split(value, self._axes.get(name, 0), count, name)

    def _split(self, value: Any, axis: int, count: int, path: str) -> list[Any]:
        if isinstance(value, Tensor):
            return self._split_tensor(value, axis, count, path)
        if callable(getattr(type(value), "smp_slice", None)):
            return [value.smp_slice(count, m, axis) for m in range(count)]
        children = children_of(value) if isinstance(value, _CONTAINERS) else None
        if not children:
            return [value] * count
        pieces = [self._split(c.value, axis, count, f"{path}{c.label}") for c in children]
        return _rebuilt(value, children, pieces, count)

    def _split_tensor(self, value: Tensor, axis: int, count: int, path: str) -> list[Any]:
        if value.dim() == 0:
            return [value] * count
        if not -value.dim() <= axis < value.dim():
            raise ConfigError(
                f"{self._name}: {path} was to be split along axis {axis}, but its shape is "
                f"{tuple(value.shape)}. Change input_split_axes, or name it in non_split_inputs."
            )
        size = value.shape[axis]
        if size == 0 or size % count:
            raise ConfigError(self._indivisible(value, axis, count, path))
        length = size // count
        return [value.narrow(axis, m * length, length) for m in range(count)]

    def _indivisible(self, value: Tensor, axis: int, count: int, path: str) -> str:
        size = value.shape[axis]
        lower = size - size % count
        valid = f"{lower} and {lower + count}" if lower else f"{lower + count}"
        return (
            f"{self._name}: {path} of shape {tuple(value.shape)} was to be split along axis {axis} "
            f"into microbatches={count} equal parts. The nearest valid sizes: {valid}. If only the "
            "last batch of an epoch is short, give the DataLoader drop_last=True; if it is no "
            "batch, name it in non_split_inputs."
        )

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            known = None
        else:
            known = set(parameters)
        for option, names in (("non_split_inputs", self._whole), ("input_split_axes", self._axes)):
            unknown = sorted(set(names) - known) if known is not None else []
            if unknown:
                raise ConfigError(
                    f"smp.step({option}=...) names {unknown}, which {self._name} does not take; "
                    f"its arguments are {sorted(known or ())}."
                )
        for name, axis in self._axes.items():
            if type(axis) is not int:
                raise ConfigError(
                    f"smp.step(input_split_axes=...): {name!r} has {axis!r}; an axis is an int."
                )


def _rebuilt(value: Any, children: list[Child], pieces: list[list[Any]], count: int) -> list[Any]:
    if all(
        piece is child.value
        for child, parts in zip(children, pieces, strict=True)
        for piece in parts
    ):
        return [value] * count  # nothing in it was split: it keeps its identity
    return [rebuild(value, children, [parts[m] for parts in pieces]) for m in range(count)]
