"""Linear layers that are split over a tensor group."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp.errors import ConfigError
from lightning_smp.tensor_parallel.collectives import (
    exchange,
    own_slice,
    reduce_out,
    scatter_sum,
)
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["ColumnLinear", "DistributedLinear", "RowLinear"]


def _initialise(module: DistributedModule, in_features: int, std: float | None) -> None:
    """Fill weight and bias with torch's default distribution, or a normal one of deviation `std`.

    The default is uniform within 1 / sqrt(in_features) of the full layer.
    """
    bound = 1 / math.sqrt(in_features)
    if std is None:
        module.fill("weight", lambda full: full.uniform_(-bound, bound))
    else:
        module.fill("weight", lambda full: full.normal_(0.0, std))
    if module.bias is not None:
        module.fill(
            "bias", lambda full: full.uniform_(-bound, bound) if std is None else full.zero_()
        )


class DistributedLinear(DistributedModule):
    """A linear layer whose input channels are split: weight [out_features, in_features / tp].

    Input [B, ..., in_features] and output [B, ..., out_features] are those of `nn.Linear`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
    ) -> None:
        """Starts with torch's default distribution.

        Raises:
            ConfigError: fewer input channels than ranks.
        """
        super().__init__(tp=tp)
        if in_features < self.tp.size:
            raise ConfigError(
                f"in_features={in_features} cannot be split over {self.tp.size} ranks; it must "
                "be at least their number"
            )
        self.in_features = in_features
        self.out_features = out_features
        sharding = Sharding.split((out_features, in_features), 1, self.tp.size)
        self.weight = self.add_split_parameter("weight", sharding)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        _initialise(self, in_features, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for own samples. Collective over tp."""
        tp = self.tp
        if tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        sizes = self.shardings["weight"].sizes
        if tp.prescaled:
            y = reduce_out(F.linear(own_slice(x, tp, -1, sizes), self.weight), tp)
        else:
            flat = x.reshape(-1, x.shape[-1])  # any leading dimensions are samples here
            everybody = exchange(flat, tp, split_dim=-1, join_dim=0, split=sizes)
            own = [flat.shape[0]] * tp.size
            y = scatter_sum(F.linear(everybody, self.weight), tp, 0, own)
            y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes of the full layer."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class ColumnLinear(DistributedModule):
    """A linear layer whose outputs are split, inside a distributed module.

    Maps [B', S, in_features] to [B', S, this rank's outputs].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        std: float | None,
        unit: int = 1,
    ) -> None:
        super().__init__(tp=tp)
        self.in_features = in_features
        weight = Sharding.split((out_features, in_features), 0, tp.size, unit=unit)
        self.weight = self.add_split_parameter("weight", weight)
        bias = Sharding.split((out_features,), 0, tp.size, unit=unit)
        self.bias = self.add_split_parameter("bias", bias)
        _initialise(self, in_features, std)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(DistributedModule):
    """A linear layer whose inputs are split, inside a distributed module.

    Maps [B', S, this rank's inputs] to the layout inside, [B', S, H] or [B', S, H/tp].
    """

    def __init__(
        self, in_features: int, layout: Layout, *, std: float | None, unit: int = 1
    ) -> None:
        tp = layout.tp
        super().__init__(tp=tp)
        self.layout = layout
        out_features = layout.hidden_size
        weight = Sharding.split((out_features, in_features), 1, tp.size, unit=unit)
        self.weight = self.add_split_parameter("weight", weight)
        if layout.is_sliced:
            bias = Sharding.split((out_features,), 0, tp.size)
            self.bias = self.add_split_parameter("bias", bias)
        else:
            self.bias = nn.Parameter(torch.empty(out_features))
            self.scaled_batch_parameters.add("bias")
        _initialise(self, in_features, std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks. Collective over tp."""
        return self.layout.from_rows(F.linear(x, self.weight)) + self.bias
