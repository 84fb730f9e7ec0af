"""What weights know of tensor parallelism: which parameters are split, and who counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import (
    Kind,
    distributed_modules,
    parameter_kinds,
    shardings_of,
)
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["TensorSplit"]


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """The tensor-parallel side of a module's weights.

    Attributes:
        tp: this rank's place in the tensor group; degree 1 where no module is distributed.
        kinds: of each parameter.
        shardings: by every name of a split parameter or buffer.
        by_parameter: the same by parameter.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    kinds: Mapping[nn.Parameter, Kind] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    by_parameter: Mapping[nn.Parameter, Sharding] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> TensorSplit:
        """Return what the distributed modules in `module` tell."""
        found = [inner for _, inner in distributed_modules(module) if inner.tp.size > 1]
        if not found:
            return cls()
        shardings = shardings_of(module)
        by_parameter = {p: shardings[n] for n, p in module.named_parameters() if n in shardings}
        return cls(found[0].tp, parameter_kinds(module), shardings, by_parameter)

    @property
    def is_active(self) -> bool:
        """Whether anything is split over a tensor group."""
        return self.tp.size > 1

    @property
    def group_factor(self) -> float:
        """What a gradient of the whole group's samples is multiplied by beside the usual share.

        Shares of all ranks of a tensor group add up. Where its ranks hold the same samples,
        each of them has the whole gradient already, which counts for all of them.
        """
        return float(self.tp.size) if self.tp.prescaled else 1.0

    def sees_group(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient comes from the samples of the whole tensor group."""
        return self.kinds.get(parameter, "plain") != "plain"

    def mean_numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements held per rank of the tensor group, on average.

        Where a parameter is split unevenly, decisions that all ranks must share go by this.
        """
        sharding = self.by_parameter.get(parameter)
        return parameter.numel() if sharding is None else -(-sharding.numel // self.tp.size)

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank of the tensor group adds the parameter to a sum over mp."""
        return self.tp.rank == 0 or self.kinds.get(parameter) == "split"
