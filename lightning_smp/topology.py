"""Which rank sits where in the grid of pipeline, tensor and reduced-data parallelism.

Pure arithmetic: no process, no group, no communication. The axes:

- ``pp``: the stages of one pipeline (same tensor and reduced-data coordinate);
- ``tp``: the ranks that split one module (same stage and reduced-data coordinate);
- ``rdp``: the ranks that hold the same parameters (same stage and tensor coordinate);
- ``dp`` = tp x rdp: the ranks of one stage, normally each with its own samples;
- ``mp`` = pp x tp: the ranks that hold one replica of the model;
- ``world``: all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Final, Literal, TypeAlias, get_args

from lightning_smp.errors import ConfigError

__all__ = ["AXES", "PLACEMENTS", "Axis", "Topology", "nearest_divisors", "placement_letters"]

Axis: TypeAlias = Literal["pp", "tp", "rdp", "dp", "mp", "world"]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)
PLACEMENTS: Final[tuple[str, ...]] = (
    "cluster",
    "spread",
    *("".join(letters) for letters in permutations("DPT")),
)
_WORDS: Final = {"cluster": "DPT", "spread": "TPD"}
# The coordinates that the members of an axis' group have in common.
_FIXED: Final[dict[Axis, str]] = {
    "pp": "TD",
    "tp": "PD",
    "rdp": "PT",
    "dp": "P",
    "mp": "D",
    "world": "",
}


def placement_letters(placement: str) -> str:
    """Return a placement as three letters, the slowest-varying axis first.

    Raises:
        ConfigError: `placement` is none of `PLACEMENTS`.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(
            f"placement_strategy {placement!r}: it must be one of {', '.join(PLACEMENTS)}. "
            'Use "cluster" for the stages of a pipeline side by side.'
        )
    return _WORDS.get(placement, placement)


def nearest_divisors(degree: int, size: int) -> tuple[int, ...]:
    """Return the divisors of `size` next to `degree`: below and above, as far as they exist."""
    small = [d for d in range(1, int(size**0.5) + 1) if size % d == 0]
    divisors = sorted({*small, *(size // d for d in small)})
    below = [d for d in divisors if d <= degree][-1:]
    above = [d for d in divisors if d > degree][:1]
    return (*below, *above)


@dataclass(frozen=True, slots=True)
class Topology:
    """A grid of ``pipeline * tensor * reduced_data`` ranks.

    Attributes:
        pipeline: number of stages.
        tensor: number of ranks that split one module.
        reduced_data: number of ranks that hold the same parameters.
        placement: "cluster" (= "DPT"), "spread" (= "TPD") or a permutation of the letters D, P
            and T; the right-most letter varies fastest with the global rank.

    Raises:
        ConfigError: a degree below 1, or an unknown placement.
    """

    pipeline: int
    tensor: int
    reduced_data: int
    placement: str = "cluster"

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "reduced_data"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} degree {value!r}: it must be an int >= 1. Use 1.")
        placement_letters(self.placement)

    @classmethod
    def from_world(
        cls, world_size: int, *, pipeline: int = 1, tensor: int = 1, placement: str = "cluster"
    ) -> Topology:
        """Return the grid of `world_size` ranks; what is left over is data parallel.

        Raises:
            ConfigError: ``pipeline * tensor`` does not divide `world_size`.
        """
        model = cls(pipeline, tensor, 1, placement).size
        if type(world_size) is not int or world_size < 1:
            raise ConfigError(f"world size {world_size!r}: it must be an int >= 1.")
        if world_size % model:
            near = " or ".join(map(str, nearest_divisors(model, world_size)))
            raise ConfigError(
                f"pipeline degree {pipeline} x tensor degree {tensor} = {model} does not divide "
                f"the world size {world_size}. Use degrees whose product is {near}, or start a "
                f"multiple of {model} ranks."
            )
        return cls(pipeline, tensor, world_size // model, placement)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.tensor * self.reduced_data

    @property
    def pp_size(self) -> int:
        """Ranks of one pipeline."""
        return self.pipeline

    @property
    def tp_size(self) -> int:
        """Ranks that split one module."""
        return self.tensor

    @property
    def rdp_size(self) -> int:
        """Ranks that hold the same parameters."""
        return self.reduced_data

    @property
    def dp_size(self) -> int:
        """Ranks of one stage."""
        return self.tensor * self.reduced_data

    @property
    def mp_size(self) -> int:
        """Ranks of one replica of the model."""
        return self.pipeline * self.tensor

    def pp_rank(self, rank: int) -> int:
        """Return the stage of global `rank`."""
        return self._coordinate("P", rank)

    def tp_rank(self, rank: int) -> int:
        """Return the tensor coordinate of global `rank`."""
        return self._coordinate("T", rank)

    def rdp_rank(self, rank: int) -> int:
        """Return the reduced-data coordinate of global `rank`."""
        return self._coordinate("D", rank)

    def dp_rank(self, rank: int) -> int:
        """Return the position of global `rank` in its sorted dp group."""
        return self.group("dp", rank).index(rank)

    def mp_rank(self, rank: int) -> int:
        """Return the position of global `rank` in its sorted mp group."""
        return self.group("mp", rank).index(rank)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the sorted global ranks of the `axis` group that holds global `rank`.

        Raises:
            IndexError: `rank` is outside the grid.
        """
        self._check(rank)
        groups, group_of_rank = _groups(self, axis)
        return groups[group_of_rank[rank]]

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups of `axis`, each sorted, ordered by their first rank."""
        return _groups(self, axis)[0]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside the grid of {self.size} ranks")

    def _coordinate(self, letter: str, rank: int) -> int:
        self._check(rank)
        letters = placement_letters(self.placement)
        sizes = {"D": self.reduced_data, "P": self.pipeline, "T": self.tensor}
        stride = 1
        for faster in letters[letters.index(letter) + 1 :]:
            stride *= sizes[faster]
        return rank // stride % sizes[letter]


@lru_cache(maxsize=64)
def _groups(topology: Topology, axis: Axis) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the groups of an axis and, for each rank, the index of its group."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.size):
        key = tuple(topology._coordinate(letter, rank) for letter in _FIXED[axis])
        members.setdefault(key, []).append(rank)
    groups = tuple(tuple(ranks) for ranks in members.values())
    index = {rank: i for i, ranks in enumerate(groups) for rank in ranks}
    return groups, tuple(index[rank] for rank in range(topology.size))
