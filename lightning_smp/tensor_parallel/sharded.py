"""Linear layers and normalisations of unmodified models, split over a tensor group.

Legend: B samples of one rank, H features in, O features out, tp ranks of the group.

A split layer stands in one of three places:

* ALONE: it brings everybody's samples together itself (where ranks have their own), or, with one
  batch on all ranks, works on that;
* GATHERED: inside a block that has already brought the samples together, and from which only
  row-wise layers and slices lead out: gradients inside are parts whose sum is the gradient;
* REGION: inside a block that has brought the samples together and computes on them what every rank
  of a group with one batch would.

From column-wise to row-wise layers activations are slices: [tp*B, ..., O/tp].
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_smp.tensor_parallel.collectives import (
    copy_in,
    exchange,
    gather,
    own_slice,
    reduce_out,
    scatter_sum,
)
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.scope import EntryScope

__all__ = ["ColumnWise", "Place", "RowWise", "SharedCopy", "SummedGradient"]


class Place(Enum):
    """Where a split layer stands; see the module's description."""

    ALONE = "alone"
    GATHERED = "gathered"
    REGION = "region"


class _SplitLayer(DistributedModule):
    """A linear layer of which a rank has some inputs or outputs.

    Attributes:
        place: where it stands.
        input_dim: dimension of the weight that runs over the inputs.
        scope: remembers the inputs that the layers of one block share.
    """

    place: Place
    input_dim: int
    scope: EntryScope | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def has_own_samples(self) -> bool:
        """Whether the layer itself moves samples between ranks."""
        return self.tp.gathers and self.place is Place.ALONE

    @property
    def sums_here(self) -> bool:
        """Whether gradients inside the block are parts, summed where the block begins."""
        return self.tp.gathers and self.place is Place.GATHERED

    def _enter(self, x: Tensor) -> Tensor:
        """The input for consumers that compute a part each."""
        if self.sums_here:
            return x
        if self.scope is None:
            return self._bring(x)
        return self.scope.entered(x, self._bring)

    def _bring(self, x: Tensor) -> Tensor:
        return gather(x, self.tp, 0) if self.has_own_samples else copy_in(x, self.tp)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.input_dim == 1 else self.weight.t())


class ColumnWise(_SplitLayer):
    """Has some of the outputs, of everybody's samples.

    Attributes:
        joins_output: whether the ranks' outputs are brought together after it.
    """

    joins_output: bool

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, ..., H] to [tp*B, ..., O/tp], or to [B, ..., O] if outputs are joined."""
        weight = self.weight if self.input_dim == 1 else self.weight.t()
        y = F.linear(self._enter(x), weight, self.bias)
        if not self.joins_output:
            self._draw_for_slices(y)
            return y
        sizes = self.shardings["weight"].sizes
        if self.has_own_samples:
            return exchange(y, self.tp, split_dim=0, join_dim=-1, join=sizes)
        return gather(y, self.tp, -1, sizes, sum_gradient=self.sums_here)

    def _draw_for_slices(self, y: Tensor) -> None:
        """What follows drops elements of slices: not alike on all ranks."""
        if self.scope is not None:
            self.scope.enter_slices()
        elif self.training and self.tp.prescaled and type(y) is Tensor:
            self.tp.begin_slices(self.ordinal, y.device)


class RowWise(_SplitLayer):
    """Has some of the inputs; the ranks' results are summed, and the bias is added once.

    Attributes:
        splits_input: whether the input comes whole.
    """

    splits_input: bool

    def forward(self, x: Tensor) -> Tensor:
        """Maps [tp*B, ..., H/tp], or [B, ..., H] if it comes whole, to [B, ..., O]."""
        if self.splits_input:
            x = self._own_inputs(x)
        y = self._product(x)
        if self.scope is not None:
            self.scope.leave_slices()
        else:
            self.tp.end_slices()
        is_mine = self.tp.gathers and self.place is not Place.REGION
        y = scatter_sum(y, self.tp, 0) if is_mine else reduce_out(y, self.tp)
        return y if self.bias is None else y + self.bias

    def _own_inputs(self, x: Tensor) -> Tensor:
        sizes = self.shardings["weight"].sizes
        if self.has_own_samples:
            return exchange(x, self.tp, split_dim=-1, join_dim=0, split=sizes)
        if self.sums_here:
            return x.narrow(-1, sum(sizes[: self.tp.rank]), sizes[self.tp.rank])
        return own_slice(x, self.tp, -1, sizes)


class SummedGradient(DistributedModule):
    """A module that every rank applies to its slices: its parameters' gradients are summed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with parameters whose gradients are summed over the group."""
        names = self.scaled_batch_parameters
        try:
            for name in names:
                self.__dict__[name] = copy_in(self._parameters[name], self.tp)  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)
        finally:
            for name in names:
                self.__dict__.pop(name, None)


class SharedCopy(DistributedModule):
    """A latent projection whose last outputs go to the heads directly, the others by a layer.

    The gradient of those outputs is a part on every rank, while the column-wise layer that the
    others meet sums theirs.

    Attributes:
        num_direct: outputs that go to the heads directly.
    """

    num_direct: int

    def forward(self, x: Tensor) -> Tensor:
        """The module's own forward."""
        y: Tensor = super().forward(x)
        latent, direct = y.split([y.shape[-1] - self.num_direct, self.num_direct], -1)
        return torch.cat([latent, copy_in(direct, self.tp)], -1)
