"""Distributed modules for classes of torch.nn."""

from __future__ import annotations

from torch import nn

from lightning_smp.nn.embedding import DistributedEmbedding
from lightning_smp.nn.linear import DistributedLinear
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import DistributedModule

__all__ = ["from_standard"]


def from_standard(module: nn.Module, tp: TensorParallel) -> DistributedModule | None:
    """Return a distributed module for an `nn.Linear` or `nn.Embedding`; None for others.

    Subclasses are others: what they add is not known.

    Raises:
        ConfigError: the sizes cannot be split.
    """
    if type(module) is nn.Linear:
        has_bias = module.bias is not None
        return DistributedLinear(module.in_features, module.out_features, has_bias, tp=tp)
    if type(module) is nn.Embedding:
        return DistributedEmbedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, module.max_norm,
            module.norm_type, module.scale_grad_by_freq, module.sparse, tp=tp,
        )  # fmt: skip
    return None
