"""Translates state dicts between Hugging Face's names and those of `DistributedTransformerLMHead`.

A table says which weights stand for which, by names with ``#`` for the number of a layer. Tensors
are handed on, not copied, except where weights are fused on one side. What a table does not name is
handed on under its own name, so that there and back again nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_smp.errors import CheckpointError

__all__ = ["Table", "Weight", "both"]


@dataclass(frozen=True)
class Weight:
    """A weight of Hugging Face's model and what stands for it here.

    Attributes:
        theirs: its name.
        ours: the names here; several where theirs is fused along its outputs.
        is_transposed: whether theirs is [in, out], as in a Conv1D.
    """

    theirs: str
    ours: tuple[str, ...]
    is_transposed: bool = False

    def to_ours(self, value: Tensor) -> list[Tensor]:
        """The weights here."""
        value = value.t() if self.is_transposed and value.dim() == 2 else value
        parts = value.chunk(len(self.ours), 0)
        return [part.contiguous() for part in parts]

    def to_theirs(self, values: Sequence[Tensor]) -> Tensor:
        """The weight there."""
        value = values[0] if len(values) == 1 else torch.cat(list(values), 0)
        return value.t().contiguous() if self.is_transposed and value.dim() == 2 else value


@dataclass(frozen=True)
class Table:
    """The weights of one type of model.

    Attributes:
        prefix: what comes before the names of the bare model in those of one with a head.
        weights: of the model with a head.
        zeros: (name here, name here of a weight with as many rows): biases that their model does
            not have. Here they are zero.
        dropped: names of theirs that hold no weights, such as stored masks.
    """

    prefix: str
    weights: tuple[Weight, ...]
    zeros: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()

    def to_ours(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a state dict of Hugging Face's model, with a head or without."""
        has_prefix = any(name.startswith(self.prefix) for name in state_dict)
        result: dict[str, Any] = {}
        for name, value in state_dict.items():
            whole = name if has_prefix else self.prefix + name
            if any(_number(pattern, whole) is not None for pattern in self.dropped):
                continue
            found = self._find(whole)
            if found is None:
                result[name] = value
                continue
            weight, number = found
            names = [pattern.replace("#", number) for pattern in weight.ours]
            result.update(zip(names, weight.to_ours(value), strict=True))
        self._add_zeros(result)
        return result

    def to_theirs(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a state dict of ours to that of their model with a head.

        Raises:
            CheckpointError: a fused weight lacks a part, or a bias that they do not have is not 0.
        """
        left = dict(state_dict)
        result: dict[str, Any] = {}
        self._take_zeros(left)
        for weight in self.weights:
            for name in list(left):
                number = _number(weight.ours[0], name)
                if number is None:
                    continue
                names = [pattern.replace("#", number) for pattern in weight.ours]
                missing = [n for n in names if n not in left]
                if missing:
                    raise CheckpointError(
                        f"{name!r} was to be translated together with {missing[0]!r}, which the "
                        "state dict does not have. Give the state dict of the whole model."
                    )
                theirs = weight.theirs.replace("#", number)
                result[theirs] = weight.to_theirs([left.pop(n) for n in names])
        return {**result, **left}

    def _find(self, name: str) -> tuple[Weight, str] | None:
        for weight in self.weights:
            number = _number(weight.theirs, name)
            if number is not None:
                return weight, number
        return None

    def _add_zeros(self, result: dict[str, Any]) -> None:
        for bias, like in self.zeros:
            for name in list(result):
                number = _number(like, name)
                if number is not None:
                    weight = result[name]
                    result.setdefault(bias.replace("#", number), weight.new_zeros(weight.shape[0]))

    def _take_zeros(self, left: dict[str, Any]) -> None:
        for bias, _ in self.zeros:
            for name in [n for n in left if _number(bias, n) is not None]:
                if bool(left[name].any()):
                    raise CheckpointError(
                        f"{name!r} is not zero, and Hugging Face's model has no such bias: the "
                        "weights cannot be translated. Freeze these biases during training."
                    )
                del left[name]


def _number(pattern: str, name: str) -> str | None:
    """The number that stands for ``#``, "" for a pattern without; None if the name does not fit."""
    if "#" not in pattern:
        return "" if name == pattern else None
    match = re.fullmatch(re.escape(pattern).replace("\\#", r"(\d+)"), name)
    return None if match is None else match.group(1)


def both(theirs: str, ours: str, *, is_transposed: bool = False) -> tuple[Weight, Weight]:
    """Weight and bias of one module."""
    return (
        Weight(f"{theirs}.weight", (f"{ours}.weight",), is_transposed),
        Weight(f"{theirs}.bias", (f"{ours}.bias",), is_transposed),
    )
