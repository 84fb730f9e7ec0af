"""What a distributed module knows of its tensor group; passed to every such module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from lightning_smp.errors import CommunicationError
from lightning_smp.placed.random import Guard, isolated_draws, mix_seed

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Draws", "TensorParallel"]

Optimize: TypeAlias = Literal["speed", "memory"]

_MAX_REMEMBERED: Final = 1 << 16
_SLICED: Final = 0x51
_REPLICATED: Final = 0x52


class Draws:
    """Seeds of random streams that the ranks of a tensor group agree on without a message.

    A module asks for a seed with a number that it drew from the default generator. The first time
    a number is seen it gets the next seed of the module, in the order of calls, which is the same
    on all ranks; afterwards the same number gives the same seed, so that recomputation under
    activation checkpointing, which restores the default generator, repeats the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._known: dict[tuple[int, int], int] = {}
        self._calls: dict[int, int] = {}

    def begin(self, *seed: int) -> None:
        """Begin a step; `seed` must be equal on the ranks of a tensor group, and on them only."""
        self._seed = mix_seed(*seed)
        self._known.clear()
        self._calls.clear()

    def seed_for(self, module: int, drawn: int) -> int:
        """Return the seed for one draw of the module with ordinal `module`."""
        key = (module, drawn)
        seed = self._known.get(key)
        if seed is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            call = self._calls.get(module, 0)
            self._calls[module] = call + 1
            seed = self._known[key] = mix_seed(self._seed, module, call)
        return seed


class TensorParallel:
    """One rank's place in its tensor group.

    Copies of a module share the object; a pickled one comes back without the group, which modules
    with more than one rank then ask for.

    Attributes:
        group_name: of the process group, as torch registers it; what operations carry.
        rank: position in the group.
        size: number of ranks that split one module; 1 needs no group.
        prescaled: whether all ranks of the group hold the same batch.
        optimize: "speed": activations between split operations are whole on every rank;
            "memory": they are split along the hidden dimension, at the price of more operations.
        group: the process group; None for one rank, and for analysis without processes.
        streams: where modules get the seeds of their random streams.

    Note: no dataclass. The engine compares the arguments of operations between stages, and looks
    into dataclasses; each stage has a group of its own.
    """

    __slots__ = (
        "_open_slices", "group", "group_name", "optimize", "prescaled", "rank", "size", "streams",
    )  # fmt: skip

    def __init__(
        self,
        group_name: str = "",
        rank: int = 0,
        size: int = 1,
        prescaled: bool = False,
        optimize: Optimize = "speed",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group_name: Final = group_name
        self.rank: Final = rank
        self.size: Final = size
        self.prescaled: Final = prescaled
        self.optimize: Final[Optimize] = optimize
        self.group: Final = group
        self.streams: Final = Draws()
        self._open_slices: tuple[int, isolated_draws] | None = None

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        *,
        prescaled: bool = False,
        optimize: Optimize = "speed",
    ) -> TensorParallel:
        """Return the place of this rank in a process group."""
        return cls(
            group_name=group.group_name,
            rank=group.rank(),
            size=group.size(),
            prescaled=prescaled,
            optimize=optimize,
            group=group,
        )

    @property
    def gathers(self) -> bool:
        """Whether modules bring together the samples of several ranks."""
        return self.size > 1 and not self.prescaled

    def require_group(self) -> dist.ProcessGroup:
        """Return the process group.

        Raises:
            CommunicationError: there is none, as in a module that was unpickled.
        """
        if self.group is None:
            raise CommunicationError(
                f"A module that is split over {self.size} ranks has no process group: it was "
                "unpickled or made for analysis. Make it anew in the running job and load its "
                "weights by load_state_dict."
            )
        return self.group

    @contextmanager
    def draws(self, module: int, device: torch.device, *, sliced: bool) -> Iterator[None]:
        """Run the body on a random stream of its own.

        Args:
            module: ordinal of the module, equal on all ranks.
            device: device that is drawn on.
            sliced: a stream per rank, for values that are split over the ranks; otherwise the same
                on all ranks, for values that each of them has.
        """
        if self.size == 1:
            yield
            return
        with isolated_draws(self._seed(module, sliced=sliced), device, Guard.TORCH):
            yield

    def begin_slices(self, module: int, device: torch.device) -> None:
        """Go on with a random stream for slices, until `end_slices`.

        For a pair of split layers with the user's code between them.
        """
        seed = self._seed(module, sliced=True)
        self._open_slices = seed, isolated_draws(seed, device, Guard.TORCH).__enter__()

    def end_slices(self) -> None:
        """Go on where `begin_slices` was called, unless another stream has taken over since.

        A unit has a stream of its own, which ends with it; its layers may be another's partners.
        """
        if self._open_slices is None:
            return
        seed, stream = self._open_slices
        self._open_slices = None
        if torch.default_generator.initial_seed() == seed:
            stream.__exit__()

    def _seed(self, module: int, *, sliced: bool) -> int:
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        seed = self.streams.seed_for(module, drawn)
        return mix_seed(seed, _SLICED if sliced else _REPLICATED, self.rank if sliced else 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self

    def __reduce__(self) -> Any:
        return (TensorParallel, self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorParallel) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return f"TensorParallel{self._values}"

    @property
    def _values(self) -> tuple[Any, ...]:
        return (self.group_name, self.rank, self.size, self.prescaled, self.optimize)
