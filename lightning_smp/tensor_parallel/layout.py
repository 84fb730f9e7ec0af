"""The layout of activations between the split operations of one distributed module.

Legend: B own samples, B' everybody's samples (tp*B, or B where the ranks hold the same samples),
S sequence, H hidden size.

Inside, whole values are the same on every rank of the group ("speed": [B', S, H]), or each rank
has its slice of the hidden dimension ("memory": [B', S, H/tp]). Linear layers come in pairs: one
whose outputs are split (columns), then one whose inputs are (rows).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_smp.tensor_parallel.collectives import (
    copy_in,
    exchange,
    gather,
    own_slice,
    reduce_out,
    scatter_sum,
)
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.record import split_sizes

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Moves activations in and out. Every method is a collective over the tensor group.

    Attributes:
        tp: the tensor group.
        hidden_size: H.
    """

    tp: TensorParallel
    hidden_size: int

    @property
    def is_sliced(self) -> bool:
        """Whether activations inside are slices of the hidden dimension."""
        return self.tp.size > 1 and self.tp.optimize == "memory"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of the hidden dimension per rank, where it is sliced."""
        return split_sizes(self.hidden_size, self.tp.size)

    def enter(self, x: Tensor) -> Tensor:
        """From own samples [B, S, H] to the layout inside."""
        if self.is_sliced:
            if self.tp.gathers:
                return exchange(x, self.tp, split_dim=-1, join_dim=0, split=self.sizes)
            return own_slice(x, self.tp, -1, self.sizes)
        return self.everybody(x)

    def leave(self, x: Tensor) -> Tensor:
        """From the layout inside to own samples [B, S, H]."""
        if self.is_sliced:
            if self.tp.gathers:
                return exchange(x, self.tp, split_dim=0, join_dim=-1, join=self.sizes)
            return gather(x, self.tp, -1, self.sizes, sum_gradient=False)
        return own_slice(x, self.tp, 0) if self.tp.gathers else x

    def everybody(self, x: Tensor) -> Tensor:
        """From own samples [B, ...] to everybody's, whole on every rank; for masks and the like."""
        return gather(x, self.tp, 0, sum_gradient=False) if self.tp.gathers else x

    def to_columns(self, x: Tensor) -> Tensor:
        """From the layout inside to [B', S, H], as split outputs need it."""
        if self.is_sliced:
            return gather(x, self.tp, -1, self.sizes)
        return copy_in(x, self.tp)

    def from_rows(self, x: Tensor) -> Tensor:
        """From each rank's summand [B', S, H] of split inputs to the layout inside."""
        if self.is_sliced:
            return scatter_sum(x, self.tp, -1, self.sizes)
        return reduce_out(x, self.tp)
