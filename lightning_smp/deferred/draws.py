"""Random draws of deferred tensors: the state they start from, and leaving out the draw itself.

Note [How a generator skips a draw]
Filling n contiguous elements on the CPU takes one 32-bit word of the Mersenne Twister after the
other, two for a float64: `uniform_` for any n, `normal_` for multiples of 16, since it works on
groups of 16 and draws the last 16 again where n is no such multiple. So whole blocks are left out
by filling a small scratch with integers, which take their words without any arithmetic, and the
rest, 16 elements or more, is drawn as it would have been. The generator ends where filling it
would have left it. That is measured for each dtype at its first use, not assumed: where it fails,
and for every other operation, the operation itself runs on one tensor, which is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError

__all__ = [
    "GROUP",
    "Draws",
    "Fill",
    "default_generator",
    "fill_of",
    "from_state",
    "is_random",
]

_ATEN = torch.ops.aten
GROUP: Final = 16
"""Elements that `normal_` draws together."""
_BLOCK: Final = 1 << 14  # words of scratch
_COUNTS: Final = (1, *(groups * GROUP + rest for groups in (2, 5) for rest in (-1, 0, 1, 15)))
"""Sizes at which blockwise draws are compared with whole ones."""

_NORMAL = frozenset(
    {_ATEN.normal_.default, _ATEN.randn.default, _ATEN.randn.generator, _ATEN.randn_like.default}
)
_UNIFORM = frozenset(
    {_ATEN.uniform_.default, _ATEN.rand.default, _ATEN.rand.generator, _ATEN.rand_like.default}
)


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that operations on a device draw from.

    Raises:
        UnsupportedError: a device other than the CPU and CUDA.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise UnsupportedError(
        f"smp.delay_param_initialization: a random operation on device {str(device)!r}. Deferred "
        "parameters can be made on the CPU and on CUDA: build the model on the CPU."
    )


@contextmanager
def from_state(device: torch.device, state: Tensor) -> Iterator[None]:
    """Lets the default generator of a device start from a state; it goes on where it was."""
    generator = default_generator(device)
    saved = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(saved)


class Draws:
    """Leaves out draws; remembers for which dtypes that can be done in blocks."""

    def __init__(self) -> None:
        self._verified: dict[tuple[Fill, torch.dtype], bool] = {}
        self._verified_values: dict[tuple[Fill, torch.dtype], bool] = {}

    def skip(self, func: Any, result: Tensor, generator: torch.Generator) -> bool:
        """Moves a generator as far as `func` would, without its memory.

        Args:
            func: a random operation.
            result: a meta tensor with the shape, strides and dtype of what it fills.
            generator: the generator that it draws from.

        Returns:
            False if that cannot be done in blocks: nothing was drawn then.
        """
        fill = fill_of(func)
        if fill is None or generator.device.type != "cpu" or not result.is_contiguous():
            return False
        if not self._works_in_blocks(fill, result.dtype):
            return False
        _skip_in_blocks(fill, result.numel(), result.dtype, generator, _BLOCK)
        return True

    def works_in_pieces(self, fill: Fill, dtype: torch.dtype) -> bool:
        """Whether piecewise draws give what one draw does: all but the last of multiples of 16."""
        key = (fill, dtype)
        if key not in self._verified_values:
            self._verified_values[key] = self._works_in_blocks(fill, dtype) and _same_in_pieces(
                fill, dtype
            )
        return self._verified_values[key]

    def _works_in_blocks(self, fill: Fill, dtype: torch.dtype) -> bool:
        key = (fill, dtype)
        if key not in self._verified:
            self._verified[key] = dtype.is_floating_point and _same_in_blocks(fill, dtype)
        return self._verified[key]


Fill = Callable[..., None]
"""Fills a tensor from a generator; then come the parameters of the distribution."""


def fill_of(func: Any) -> Fill | None:
    """Returns what an operation does to the tensor that it fills or makes, if it is known here."""
    return _normal if func in _NORMAL else _uniform if func in _UNIFORM else None


def _normal(tensor: Tensor, generator: torch.Generator, *numbers: float) -> None:
    tensor.normal_(*numbers, generator=generator)


def _uniform(tensor: Tensor, generator: torch.Generator, *numbers: float) -> None:
    tensor.uniform_(*numbers, generator=generator)


def _skip_in_blocks(
    fill: Fill, count: int, dtype: torch.dtype, generator: torch.Generator, block: int
) -> None:
    words = count * (2 if dtype is torch.float64 else 1)
    tail = count % block + (block if count >= block and count % block < GROUP else 0)
    left = words - tail * (words // count)
    scratch = torch.empty(min(left, block) // 2, dtype=torch.int64, device="cpu")
    while left > 0:
        scratch[: left // 2].random_(generator=generator)
        left -= 2 * scratch.numel()
    if tail:
        fill(torch.empty(tail, dtype=dtype, device="cpu"), generator)


def _same_in_blocks(fill: Fill, dtype: torch.dtype) -> bool:
    """Compares the generator's state after whole and after blockwise draws of a few sizes."""
    for count in _COUNTS:
        whole = torch.Generator().manual_seed(count)
        blockwise = torch.Generator().manual_seed(count)
        fill(torch.empty(count, dtype=dtype, device="cpu"), whole)
        _skip_in_blocks(fill, count, dtype, blockwise, 2 * GROUP)
        if not torch.equal(whole.get_state(), blockwise.get_state()):
            return False
    return True


def _same_in_pieces(fill: Fill, dtype: torch.dtype) -> bool:
    """Compares the numbers of whole and of piecewise draws of a few sizes."""
    for count in _COUNTS:
        whole, pieces = (torch.empty(count, dtype=dtype, device="cpu") for _ in range(2))
        fill(whole, torch.Generator().manual_seed(count))
        generator = torch.Generator().manual_seed(count)
        bounds = [*range(0, count - GROUP + 1, 2 * GROUP)] or [0]
        for start, stop in zip(bounds, [*bounds[1:], count], strict=True):
            fill(pieces[start:stop], generator)
        if not torch.equal(whole, pieces):
            return False
    return True
