"""What the units of a step cost for any number of samples in a microbatch. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_smp.partitioning import Analysis, AtomCost, DeviceModel, Work
from lightning_smp.partitioning.costs import scaled

__all__ = ["Profile"]


class Profile:
    """Analyses of one step with one or two numbers of samples; see Note [Samples] in costs.py.

    Args:
        analyses: by number of samples. With one, everything is proportional to it.
        device: turns work into time.
    """

    def __init__(self, analyses: Mapping[int, Analysis], device: DeviceModel) -> None:
        self.device = device
        self._few, *_ = self._sizes = sorted(analyses)
        self._analyses = dict(analyses)
        self._costs: dict[tuple[int, int], dict[str | None, AtomCost]] = {}

    @property
    def analysis(self) -> Analysis:
        """The one of the fewest samples: order, parameters, and what went wrong."""
        return self._analyses[self._few]

    def costs(self, samples: int, divided: int = 1) -> Mapping[str | None, AtomCost]:
        """Return the costs of a microbatch by unit; that of outer code under None.

        Args:
            samples: samples of the microbatch.
            divided: number of tensor-parallel ranks that share the kernels' work.
        """
        key = (samples, divided)
        if key not in self._costs:
            if self.analysis.work:
                self._costs[key] = self._priced(samples, divided)
            else:
                self._costs[key] = self._counted(samples / self._few, divided)
        return self._costs[key]

    def _priced(self, samples: int, divided: int) -> dict[str | None, AtomCost]:
        known: dict[tuple[Work, ...], AtomCost] = {}  # equal layers are priced once
        found = {}
        for name in self.analysis.work:
            works = tuple(self._analyses[size].work[name] for size in self._sizes)
            if works not in known:
                known[works] = self._at(samples, works).cost(self.device, divided)
            found[name] = known[works]
        return found

    def _at(self, samples: int, works: tuple[Work, ...]) -> Work:
        last = self._sizes[-1]
        found = None
        if len(works) > 1:
            share = (samples - self._few) / (last - self._few)
            found = works[0].toward(works[-1], share)
        return scaled(works[-1], samples / last) if found is None else found

    def _counted(self, factor: float, divided: int) -> dict[str | None, AtomCost]:
        """What parameter counts say, of a step that could not be run."""
        found: dict[str | None, AtomCost] = {None: AtomCost()}
        for name, cost in self.analysis.costs.items():
            found[name] = AtomCost(
                forward_s=cost.forward_s * factor / divided,
                backward_s=cost.backward_s * factor / divided,
            )
        return found
