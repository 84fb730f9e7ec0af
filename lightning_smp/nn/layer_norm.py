"""Layer norms: of whole rows, and of rows whose channels are split over a tensor group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_smp.tensor_parallel.collectives import copy_in, reduce_out
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["DistributedLayerNorm", "FusedLayerNorm", "layer_norm"]


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, which torch computes in one kernel, under SMP's name.

    All layer norms inside distributed modules are instances of it.
    """


class DistributedLayerNorm(DistributedModule, FusedLayerNorm):
    """A layer norm over channels that are split over a tensor group: [B', S, H/tp] each.

    The two moments of a row are summed over the ranks; weight and bias are split.
    """

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, *, tp: TensorParallel | None = None
    ) -> None:
        DistributedModule.__init__(self, tp=tp)
        self.normalized_shape = (normalized_shape,)
        self.eps = eps
        self.elementwise_affine = True
        sharding = Sharding.split((normalized_shape,), 0, self.tp.size)
        self.weight = self.add_split_parameter("weight", sharding)
        self.bias = self.add_split_parameter("bias", sharding)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised slice. Collective over tp."""
        if self.tp.size == 1:
            return FusedLayerNorm.forward(self, input)
        x = input if input.dtype == torch.float64 else input.float()
        size = self.normalized_shape[0]
        mean = self._sum(x) / size
        centred = x - mean
        variance = self._sum(centred.square()) / size  # of the centred: no cancellation
        normal = centred * torch.rsqrt(variance + self.eps)
        return (normal * self.weight + self.bias).to(input.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks' channels, which each rank then uses for its own."""
        return copy_in(reduce_out(x.sum(-1, keepdim=True), self.tp), self.tp)


class _WholeRows(DistributedModule, FusedLayerNorm):
    """A layer norm of whole rows of everybody's samples: every rank has its gradient alike."""

    def __init__(self, layout: Layout, eps: float) -> None:
        DistributedModule.__init__(self, tp=layout.tp)
        self.normalized_shape = (layout.hidden_size,)
        self.eps = eps
        self.elementwise_affine = True
        self.weight = nn.Parameter(torch.empty(layout.hidden_size))
        self.bias = nn.Parameter(torch.empty(layout.hidden_size))
        self.scaled_batch_parameters.update(("weight", "bias"))
        self.reset_parameters()

    forward = nn.LayerNorm.forward


def layer_norm(layout: Layout, eps: float) -> FusedLayerNorm:
    """Return the layer norm for activations in a layout."""
    if layout.is_sliced:
        return DistributedLayerNorm(layout.hidden_size, eps, tp=layout.tp)
    return _WholeRows(layout, eps)
