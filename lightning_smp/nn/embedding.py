"""An embedding whose channels are split over a tensor group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_smp.errors import ConfigError
from lightning_smp.tensor_parallel.collectives import exchange, gather
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.operations import all_reduce
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(DistributedModule):
    """An embedding of which each rank holds some channels: weight [num_embeddings, dim / tp].

    Input [B, ...] of indices, output [B, ..., embedding_dim], as of `nn.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        """Starts with normal numbers of deviation `initializer_range`.

        Args:
            num_embeddings: rows.
            embedding_dim: channels of the whole.
            padding_idx: as in `nn.Embedding`.
            max_norm: as in `nn.Embedding`; the norm is that of whole rows.
            norm_type: as in `nn.Embedding`.
            scale_grad_by_freq: as in `nn.Embedding`.
            sparse: as in `nn.Embedding`.
            _weight: the whole weight to start with.
            initializer_range: deviation of the initial numbers.
            _skip_allgather: the indices are everybody's already.
            _skip_scatter_and_merge: return everybody's samples, this rank's channels.
            tp: the tensor group.

        Raises:
            ConfigError: fewer channels than ranks.
        """
        super().__init__(tp=tp)
        if embedding_dim < self.tp.size:
            raise ConfigError(
                f"embedding_dim={embedding_dim} cannot be split over {self.tp.size} ranks; it "
                "must be at least their number"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self._skip_allgather = _skip_allgather
        self._skip_scatter_and_merge = _skip_scatter_and_merge
        sharding = Sharding.split((num_embeddings, embedding_dim), 1, self.tp.size)
        self.weight = self.add_split_parameter("weight", sharding)
        if _weight is None:
            self.fill("weight", lambda full: full.normal_(0.0, initializer_range))
        else:
            self.fill("weight", lambda full: full.copy_(_weight))
        if _weight is None and self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of own samples. Collective over tp."""
        tp = self.tp
        is_own = tp.gathers and not self._skip_allgather
        indices = gather(input, tp, 0) if is_own else input
        if self.max_norm is not None:
            self._limit_norms(indices)
        part = F.embedding(
            indices, self.weight, self.padding_idx, None, self.norm_type,
            self.scale_grad_by_freq, self.sparse,
        )  # fmt: skip
        if self._skip_scatter_and_merge or tp.size == 1:
            return part
        sizes = self.shardings["weight"].sizes
        if tp.prescaled:
            return gather(part, tp, -1, sizes, sum_gradient=False)
        return exchange(part, tp, split_dim=0, join_dim=-1, join=sizes)

    @torch.no_grad()
    def _limit_norms(self, indices: Tensor) -> None:
        """Scale the rows that are used to the largest norm allowed, as `nn.Embedding` does."""
        assert self.max_norm is not None
        rows = indices.unique()
        used = self.weight[rows]
        powers = used.abs().pow(self.norm_type).sum(-1)
        if self.tp.size > 1:
            powers = all_reduce(powers, self.tp.group_name)
        norms = powers.pow(1 / self.norm_type)
        scale = torch.where(norms > self.max_norm, self.max_norm / (norms + 1e-7), 1.0)
        self.weight[rows] = used * scale.unsqueeze(-1).to(used.dtype)

    def extra_repr(self) -> str:
        """Sizes of the whole embedding."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
