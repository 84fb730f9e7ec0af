"""Embeddings and heads of unmodified models whose vocabulary is split over a tensor group.

Legend: B samples of one rank, S tokens, H hidden size, V vocabulary, tp ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_smp.tensor_parallel import operations as ops
from lightning_smp.tensor_parallel.collectives import (
    copy_in,
    exchange,
    gather,
    reduce_out,
    scatter_sum,
)
from lightning_smp.tensor_parallel.logits import Vocabulary, split_logits
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = ["EmbeddingColumns", "HeadBias", "VocabularyEmbedding", "VocabularyHead"]


class _Embedding(DistributedModule):
    weight: nn.Parameter
    padding_idx: int | None

    def _everybodys(self, ids: Tensor) -> Tensor:
        """All ranks' numbers [tp*B, ...]; the same for a batch that all ranks have."""
        tp = self.tp
        if not tp.gathers:
            return ids
        sizes = [ids.shape[0]] * tp.size
        everybodys: Tensor = ops.all_gather(ids, 0, sizes, tp.rank, tp.group_name)
        return everybodys


class VocabularyEmbedding(_Embedding):
    """An embedding of which a rank has some rows."""

    def forward(self, ids: Tensor) -> Tensor:
        """Maps [B, ...] to [B, ..., H]; every rank looks up what it has of everybody's tokens.

        Collective over tp: all ranks must bring the same number of tokens.
        """
        sizes = self.shardings["weight"].sizes
        start = sum(sizes[: self.tp.rank])
        local = self._everybodys(ids) - start
        is_here = (local >= 0) & (local < sizes[self.tp.rank])
        found = super().forward(local.clamp(0, sizes[self.tp.rank] - 1))
        found = found * is_here[..., None]
        if self.tp.gathers:
            return scatter_sum(found, self.tp, 0)
        return reduce_out(found, self.tp)


class EmbeddingColumns(_Embedding):
    """An embedding of which a rank has some columns, which are joined after the look-up."""

    def forward(self, ids: Tensor) -> Tensor:
        """Maps [B, ...] to [B, ..., H]. Collective over tp."""
        found: Tensor = super().forward(self._everybodys(ids))
        sizes = self.shardings["weight"].sizes
        if self.tp.gathers:
            return exchange(found, self.tp, split_dim=0, join_dim=-1, join=sizes)
        return gather(found, self.tp, -1, sizes, sum_gradient=False)


class HeadBias(DistributedModule):
    """An embedding with a column for each attention head: a rank has those of its heads."""


class VocabularyHead(DistributedModule):
    """A linear layer from hidden states to logits of which a rank has some classes.

    Attributes:
        vocabulary: how the classes are split.
    """

    vocabulary: Vocabulary
    weight: nn.Parameter
    bias: nn.Parameter | None
    input_dim: int

    def forward(self, hidden: Tensor) -> Any:
        """Maps [B, ..., H] to logits [B, ..., V] that are split; see `SplitLogits`.

        Collective over tp where ranks have samples of their own, and in the backward.
        """
        tp = self.tp
        rows = gather(hidden[None], tp, 0) if tp.gathers else copy_in(hidden, tp)[None]
        weight = self.weight if self.input_dim == 1 else self.weight.t()
        return split_logits(F.linear(rows, weight, self.bias), self.vocabulary)
