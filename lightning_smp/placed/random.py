"""Random streams that do not depend on the layout.

Outer code draws from the default generators, which are equal on all ranks of a pipeline group (the
replicated stream). A unit, or an outer operation on placed tensors, runs on one rank only; it draws
from a stream seeded by what it is, so that the replicated stream is untouched and the same numbers
come out whatever rank runs it, in whatever order, and again on recomputation.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = [
    "SEED_START",
    "DrawState",
    "Generators",
    "Guard",
    "digest_draws",
    "digest_torch_draws",
    "generators_of",
    "isolated_draws",
    "lend",
    "mix_seed",
    "seed_everywhere",
    "stir",
    "take_back",
    "unit_seed",
]

SEED_START = 0x9E3779B97F4A7C15
"""The state that seeds are mixed from."""

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """A 63-bit seed from integers (the finaliser of splitmix64, Steele et al., OOPSLA 2014)."""
    return stir(SEED_START, *parts) & (_MASK >> 1)


def unit_seed(state: int, unit: int, ordinal: int) -> int:
    """The seed of a unit's stream in one of its calls.

    Args:
        state: what the step's and the microbatch's part of the seed have been stirred into.
        unit: ordinal of the unit.
        ordinal: of the call among those of the unit, in this microbatch.
    """
    return stir(state, unit | ordinal << 32) & (_MASK >> 1)


def stir(state: int, *parts: int) -> int:
    """The state after some of a seed's parts, for those that many seeds begin with."""
    for part in parts:
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class DrawState:
    """The state of Python's, NumPy's and torch's default generators, to compare and restore."""

    __slots__ = ("_cuda", "_device", "_numpy", "_python", "_torch")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        numpy_random = _numpy_random()
        self._numpy = None if numpy_random is None else numpy_random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Puts all generators back to this state."""
        random.setstate(self._python)
        numpy_random = _numpy_random()
        if self._numpy is not None and numpy_random is not None:
            numpy_random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def to_plain(self) -> list[Any]:
        """The state as plain data, for another rank."""
        numpy_state = None if self._numpy is None else [str(self._numpy[0]), *self._numpy[1:]]
        return [
            [self._python[0], list(self._python[1]), self._python[2]],
            numpy_state,
            self._torch,
            self._cuda,
        ]

    @classmethod
    def from_plain(cls, data: list[Any], device: torch.device) -> DrawState:
        """The state that another rank wrote by `to_plain`."""
        state = cls.__new__(cls)
        state._device = device
        state._python = (data[0][0], tuple(data[0][1]), data[0][2])
        state._numpy = None if data[1] is None else tuple(data[1])
        state._torch = data[2]
        state._cuda = data[3]
        return state


def digest_draws(device: torch.device) -> int:
    """A hash that is equal on ranks whose default generators are in the same state."""
    digest = digest_torch_draws(device)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        digest = zlib.crc32(_numpy_words(numpy_random), digest)
    return _digest_python_draws(digest)


def digest_torch_draws(device: torch.device) -> int:
    """The same for torch's generators only."""
    digest = zlib.crc32(_torch_memory(torch.default_generator))
    if device.type == "cuda":
        digest = zlib.crc32(_torch_memory(_cuda_generator(device)), digest)
    return digest


def _torch_memory(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


# Python and NumPy make their states number by number, which costs up to 160 microseconds. The same
# memory can be read: the 624 words of a Mersenne twister and the position among them.
_Words = ctypes.c_uint32 * 625


def _numpy_words(numpy_random: Any) -> Any:
    generator = numpy_random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return repr(generator.state).encode()
    return _Words.from_address(generator.ctypes.state_address)


def _digest_python_draws(digest: int) -> int:
    generator = getattr(random.getstate, "__self__", None)  # the hidden one of the module
    offset = _offset_of_words()
    if type(generator) is random.Random and offset is not None:
        digest = zlib.crc32(_Words.from_address(id(generator) + offset), digest)
        waiting = generator.gauss_next  # type: ignore[attr-defined]
    else:
        _, (*words, position), waiting = random.getstate()
        digest = zlib.crc32(_Words(position, *words), digest)
    return digest if waiting is None else zlib.crc32(repr(waiting).encode(), digest)


@cache
def _offset_of_words() -> int | None:
    """Where in memory a generator of Python keeps its position and its words.

    None if this Python does not keep them right behind the object's header, as CPython does: a
    generator is asked for its state, and the memory must say the same.
    """
    offset = object.__basicsize__
    compiled = random.Random.__base__
    room = 0 if compiled is None else compiled.__basicsize__
    if sys.implementation.name != "cpython" or room < offset + ctypes.sizeof(_Words):
        return None
    probe = random.Random(SEED_START)
    for _ in range(2):
        probe.random()
        *words, position = probe.getstate()[1]
        if list(_Words.from_address(id(probe) + offset)) != [position, *words]:
            return None
    return offset


def seed_everywhere(seed: int, device: torch.device) -> None:
    """Seeds Python's, NumPy's and torch's default generators."""
    random.seed(seed)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(seed)


class Guard(IntEnum):
    """Which of the default generators must be guarded while a unit draws from its own streams."""

    DEVICE = 0
    """Torch's for the run's device."""
    TORCH = 1
    """And torch's for the host, whose state is 5 kilobytes."""
    ALL = 2
    """And Python's and NumPy's, which costs about 15 microseconds."""


class Generators(NamedTuple):
    """Generators that units may draw from."""

    cuda: torch.Generator | None
    host: torch.Generator | None


Lent = tuple[int, int, torch.Tensor | None]
"""Where generators were when they were lent: seed and offset of CUDA's, state of the host's."""


def generators_of(device: torch.device, guard: Guard) -> Generators | None:
    """The generators to `lend` under a guard; None if those of torch are not all."""
    if guard is Guard.ALL:
        return None
    cuda = _cuda_generator(device) if device.type == "cuda" else None
    needs_host = cuda is None or guard is Guard.TORCH
    return Generators(cuda, torch.default_generator if needs_host else None)


def lend(generators: Generators, seed: int) -> Lent:
    """Seeds generators for a unit; returns what to `take_back` afterwards.

    Called once a unit, between work that empties the caches. There a line of Python costs several
    times what it does in a loop, and a state of 16 bytes in a tensor 20 microseconds.
    """
    cuda, host = generators
    before, offset, state = 0, 0, None
    if cuda is not None:
        before, offset = cuda.initial_seed(), cuda.get_offset()
        cuda.manual_seed(seed)
    if host is not None:
        state = host.get_state()
        host.manual_seed(seed)
    return before, offset, state


def take_back(generators: Generators, lent: Lent) -> None:
    """Lets generators go on where they were."""
    cuda, host = generators
    before, offset, state = lent
    if cuda is not None:
        cuda.manual_seed(before)
        cuda.set_offset(offset)
    if host is not None:
        assert state is not None
        host.set_state(state)


class isolated_draws:  # noqa: N801 - a context manager, used like a function
    """Runs its body on streams seeded by ``seed``; the default streams go on where they were.

    Args:
        seed: for the generators that are guarded.
        device: the run's device.
        guard: which are; the others are left alone.
    """

    __slots__ = ("_device", "_generators", "_saved", "_seed")

    def __init__(self, seed: int, device: torch.device, guard: Guard) -> None:
        self._seed = seed
        self._device = device
        self._generators = generators_of(device, guard)

    def __enter__(self) -> isolated_draws:
        if self._generators is None:
            self._saved: Any = DrawState(self._device)
            seed_everywhere(self._seed, self._device)
        else:
            self._saved = lend(self._generators, self._seed)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._generators is None:
            self._saved.restore()
        else:
            take_back(self._generators, self._saved)

    def used(self) -> bool:
        """Whether the body has drawn from torch so far (asked inside it)."""
        is_cuda = self._device.type == "cuda"
        drew_cuda = is_cuda and _cuda_generator(self._device).get_offset() > 0
        return drew_cuda or self._used_host()

    def needed(self) -> Guard:
        """The least guard that would do for what the body has drawn so far; asked under `ALL`."""
        if self._used_python():
            return Guard.ALL
        return Guard.TORCH if self._used_host() else Guard.DEVICE

    def _used_host(self) -> bool:
        now = torch.default_generator.get_state()
        fresh = torch.Generator().manual_seed(self._seed).get_state()
        return not torch.equal(now, fresh)

    def _used_python(self) -> bool:
        now = random.getstate()
        random.seed(self._seed)
        drew = now != random.getstate()
        random.setstate(now)
        numpy_random = _numpy_random()
        if numpy_random is not None:
            fresh = numpy_random.RandomState(self._seed & 0xFFFFFFFF).get_state()
            here = numpy_random.get_state()
            drew |= here[2] != fresh[2] or not (here[1] == fresh[1]).all()
        return bool(drew)


def _cuda_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0]


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random
