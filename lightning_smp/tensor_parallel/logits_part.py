"""The columns of split logits that a rank holds, and how they become whole.

Legend: g ranks whose rows are here (tp ranks with samples of their own, or 1 if all ranks have the
same samples), V vocabulary, V_local columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_smp.tensor_parallel.collectives import exchange, gather
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.cross_entropy import Buffer
from lightning_smp.tensor_parallel.gathers import GatherReport

__all__ = ["Layout", "Part", "Vocabulary", "cut", "join"]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary that is split over a tensor group.

    Attributes:
        tp: the tensor group.
        sizes: classes of each rank, in order.
        name: of the head, for reports.
        report: collects uses that gather the logits.
    """

    tp: TensorParallel
    sizes: tuple[int, ...]
    name: str = "head"
    report: GatherReport = field(default_factory=GatherReport)

    def __deepcopy__(self, memo: dict[int, Any]) -> Vocabulary:
        return self


@dataclass(frozen=True, eq=False)
class Layout:
    """What the logits look like to the user.

    Attributes:
        vocabulary: how the classes are split.
        dtype: of the logits as the user sees them; the part is cast when it matters.
        class_dim: dimension of the vocabulary as the user sees it.
        rows: [n], numbers of this rank's rows that were chosen; None for all.
    """

    vocabulary: Vocabulary
    dtype: torch.dtype
    class_dim: int
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank holds of split logits.

    Attributes:
        local: [g, ..., V_local]; the vocabulary comes last here.
        layout: what it stands for.
        buffer: the memory of `local`, None if something else needs its values in the backward.
    """

    local: Tensor
    layout: Layout
    buffer: Buffer | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        layout = self.layout
        lead = [*self.local.shape[1:-1]] if layout.rows is None else [len(layout.rows)]
        lead.insert(layout.class_dim, sum(layout.vocabulary.sizes))
        return tuple(lead)

    @property
    def is_plain(self) -> bool:
        """Whether the vocabulary is the last dimension and no rows were chosen."""
        return self.layout.rows is None and self.layout.class_dim == self.local.dim() - 2

    def same_memory(self, local: Tensor, **changes: Any) -> Part:
        """Return a part that is a view of this one, with a changed layout."""
        return Part(local, replace(self.layout, **changes), self.buffer)

    def new_memory(self, local: Tensor, *, is_saved: bool) -> Part:
        """Return a part computed from this one; `is_saved`: its values are needed for that."""
        return Part(local, replace(self.layout, dtype=local.dtype), None if is_saved else Buffer())


def join(part: Part) -> Tensor:
    """Return this rank's full logits. Collective over tp, in the backward too."""
    layout, local = part.layout, part.local.to(part.layout.dtype)
    tp, sizes = layout.vocabulary.tp, layout.vocabulary.sizes
    if tp.gathers:
        parts = exchange(local, tp, split_dim=0, join_dim=-1, split=[1] * tp.size, join=sizes)
        full = parts[0]
    else:
        full = gather(local[0], tp, -1, sizes, sum_gradient=False)
    if layout.rows is not None:
        full = full.flatten(0, -2).index_select(0, layout.rows)
    return full.movedim(-1, layout.class_dim)


def cut(full: Tensor, layout: Layout, lead: torch.Size) -> Tensor:
    """Return this rank's columns of everybody's rows for a gradient of full logits.

    Collective over tp, if ranks have samples of their own.

    Args:
        full: gradient of this rank's full logits.
        layout: of the logits.
        lead: dimensions of the part between the first and the vocabulary.
    """
    tp, sizes = layout.vocabulary.tp, layout.vocabulary.sizes
    full = full.movedim(layout.class_dim, -1)
    if layout.rows is not None:
        spread = full.new_zeros((lead.numel(), full.shape[-1]))
        full = spread.index_add_(0, layout.rows, full).unflatten(0, lead)
    if tp.gathers:
        return exchange(full[None], tp, split_dim=-1, join_dim=0, split=sizes)
    return full.narrow(-1, sum(sizes[: tp.rank]), sizes[tp.rank])[None]
