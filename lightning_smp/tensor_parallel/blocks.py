"""Blocks: modules of unmodified models that bring their inputs together for split layers inside.

Legend: B samples of one rank, tp ranks of the group. Only with samples of its own on each rank does
a block communicate; with one batch on all ranks it lets its layers share what they bring in.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.placed.structure import iter_tensors, map_tensors
from lightning_smp.tensor_parallel.collectives import (
    copy_in,
    exchange,
    gather,
    own_slice,
    reduce_out,
    scatter_sum,
)
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.scope import BlockDraws, EntryScope
from lightning_smp.tensor_parallel.sharded import Place

__all__ = ["GatheringBlock", "SplitExperts"]


class GatheringBlock(DistributedModule):
    """A module that works on everybody's samples.

    Attributes:
        path: dotted name in the model, for errors.
        place: of the split layers inside.
        ends_inside: whether a row-wise layer inside gives own samples back; otherwise the result
            is slices of everybody's samples, and a row-wise layer elsewhere ends them.
        scope: remembers the inputs that the layers share.
        is_attention: whether samples must come first in tensors of three or more dimensions.
        sliced: names of arguments, and numbers of results, that hold a slice for each rank's heads
            and pass from block to block.
    """

    path: str
    place: Place
    ends_inside: bool
    scope: EntryScope
    is_attention: bool
    sliced: tuple[frozenset[str], frozenset[int]]

    is_never_divided = True  # its random streams span it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on everybody's samples. Collective over tp."""
        own = 0
        if self.tp.gathers:
            own = self._samples(args, kwargs)
            args, kwargs = self._gather_all(own, args, kwargs)
        with self.scope.running(self._streams(args, kwargs)):
            result = super().forward(*args, **kwargs)
        return self._leave(result, own, kwargs)

    def _streams(self, args: Any, kwargs: Any) -> BlockDraws | None:
        """The random streams of this call; None where nothing is drawn, or for no real tensor."""
        main = next(iter_tensors((args, kwargs)), None)
        if not self.training or type(main) is not Tensor:
            return None
        device = main.device
        whole = partial(self.draws, device, sliced=False) if self.tp.gathers else None
        returns_own = self.tp.gathers and self.place is Place.GATHERED
        return BlockDraws(whole, partial(self.draws, device, sliced=True), returns_own)

    # ---- in -------------------------------------------------------------------------------------

    def _samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        main = next(iter_tensors((args, kwargs)), None)
        if main is None or main.dim() < (3 if self.is_attention else 2):
            raise UnsupportedError(
                f"{self.path!r} is split over {self.tp.size} ranks with samples of their own, so "
                "its first tensor must have the samples as its first of three dimensions; met "
                f"{None if main is None else tuple(main.shape)}. Use prescaled_batch=True, or "
                "leave it whole."
            )
        if any(value is not None and name.startswith("cu_seq") for name, value in kwargs.items()):
            raise UnsupportedError(
                f"{self.path!r} got packed sequences (cu_seq_lens), whose lengths differ between "
                "the tensor-parallel ranks. Use prescaled_batch=True, or pad instead."
            )
        return main.shape[0]

    def _gather_all(self, own: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = _argument_names(type(self))  # type: ignore[arg-type]
        is_first = [True]

        def change(name: str, value: Any) -> Any:
            return map_tensors(value, lambda tensor: self._gather(name, tensor, own, is_first))

        named = [*names, *[""] * len(args)]  # *args of a forward have no names
        positional = [change(name, v) for name, v in zip(named, args, strict=False)]
        return positional, {name: change(name, value) for name, value in kwargs.items()}

    def _gather(self, name: str, tensor: Tensor, own: int, is_first: list[bool]) -> Tensor:
        if not is_first[0]:
            is_flat = tensor.dim() == 2 and tensor.is_floating_point() and "mask" not in name
            is_alike = name in self.sliced[0] or tensor.dim() < 2 or tensor.shape[0] != own
            if is_flat or is_alike:
                return tensor
        is_first[0] = False
        if tensor.requires_grad or "mask" in name:
            return gather(tensor, self.tp, 0, sum_gradient=self.place is Place.GATHERED)
        return gather_once(tensor, self.tp)

    # ---- out ------------------------------------------------------------------------------------

    def _leave(self, result: Any, own: int, kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, tuple):
            return map_tensors(result, lambda t: self._give_back(t, own))
        return tuple(self._leave_one(i, item, own, kwargs) for i, item in enumerate(result))

    def _leave_one(self, number: int, item: Any, own: int, kwargs: dict[str, Any]) -> Any:
        if number in self.sliced[1]:
            return item
        if self.is_attention and number > 0 and isinstance(item, Tensor) and item.dim() == 4:
            if not kwargs.get("output_attentions", True):
                return None
            return self._attentions(item)
        return map_tensors(item, lambda t: self._give_back(t, own))

    def _give_back(self, tensor: Tensor, own: int) -> Tensor:
        """A result of this rank's own samples."""
        if not self.tp.gathers or (not self.ends_inside and self.place is Place.GATHERED):
            return tensor
        if self.place is Place.REGION and tensor.dim() and tensor.shape[0] == own * self.tp.size:
            return own_slice(tensor, self.tp, 0)
        if tensor.dim() and tensor.shape[0] == own:
            return tensor
        raise UnsupportedError(
            f"{self.path!r}, split over {self.tp.size} ranks, returned a tensor of shape "
            f"{tuple(tensor.shape)} for {own} samples of this rank. What leaves it must come from "
            "its row-wise layer. Use prescaled_batch=True, or leave it whole."
        )

    def _attentions(self, weights: Tensor) -> Tensor:
        """Attention weights of all heads [B, heads, S, S]."""
        if self.tp.gathers:
            return exchange(weights, self.tp, split_dim=0, join_dim=1)
        return gather(weights, self.tp, 1, sum_gradient=False)


class SplitExperts(DistributedModule):
    """Experts as one module with stacked weights: a rank has some inner channels of each."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on everybody's tokens [tp*B, H]. Collective over tp."""
        tp = self.tp
        own = next(iter_tensors((args, kwargs))).shape[0]

        def enter(tensor: Tensor) -> Tensor:
            if tp.gathers:
                is_mine = tensor.dim() > 0 and tensor.shape[0] == own
                return gather(tensor, tp, 0) if is_mine else tensor
            return copy_in(tensor, tp) if tensor.requires_grad else tensor

        args, kwargs = map_tensors(args, enter), map_tensors(kwargs, enter)
        result = super().forward(*args, **kwargs)
        if tp.gathers:
            return map_tensors(result, lambda t: scatter_sum(t, tp, 0))
        return map_tensors(result, lambda t: reduce_out(t, tp))


def gather_once(tensor: Tensor, tp: TensorParallel) -> Tensor:
    """Return everybody's samples of a table without gradient, however many blocks ask for it.

    The gathered tensor is kept as an attribute, so that it lives as long as the table, on all ranks
    alike. Not for masks: whether a model makes one, or one for each layer, may depend on its data.
    """
    version = 0 if tensor.is_inference() else tensor._version
    known = tensor.__dict__.get("_smp_gathered")
    if known is not None and known[0] == version:
        gathered: Tensor = known[1]
        return gathered
    result = gather(tensor, tp, 0)
    tensor.__dict__["_smp_gathered"] = (version, result)
    return result


@cache
def _argument_names(kind: type) -> list[str]:
    """Names of the positional arguments of the original class's forward."""
    original = kind.__mro__[kind.__mro__.index(DistributedModule) + 1]
    parameters = inspect.signature(original.forward).parameters.values()  # type: ignore[attr-defined]
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
