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

__all__ = ["Draws", "default_generator", "from_state", "is_random"]

_ATEN = torch.ops.aten
_GROUP: Final = 16
_BLOCK: Final = 1 << 14  # words of scratch

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
        self._verified: dict[tuple[bool, torch.dtype], bool] = {}

    def skip(self, func: Any, result: Tensor, generator: torch.Generator) -> bool:
        """Moves a generator as far as `func` would, without its memory.

        Args:
            func: a random operation.
            result: a meta tensor with the shape, strides and dtype of what it fills.
            generator: the generator that it draws from.

        Returns:
            False if that cannot be done in blocks: nothing was drawn then.
        """
        fill = _normal if func in _NORMAL else _uniform if func in _UNIFORM else None
        if fill is None or generator.device.type != "cpu" or not result.is_contiguous():
            return False
        if not self._works_in_blocks(fill, result.dtype):
            return False
        _skip_in_blocks(fill, result.numel(), result.dtype, generator, _BLOCK)
        return True

    def _works_in_blocks(self, fill: _Fill, dtype: torch.dtype) -> bool:
        key = (fill is _normal, dtype)
        if key not in self._verified:
            self._verified[key] = dtype.is_floating_point and _same_in_blocks(fill, dtype)
        return self._verified[key]


_Fill = Callable[[Tensor, torch.Generator], Any]


def _normal(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


def _uniform(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(generator=generator)


def _skip_in_blocks(
    fill: _Fill, count: int, dtype: torch.dtype, generator: torch.Generator, block: int
) -> None:
    words = count * (2 if dtype is torch.float64 else 1)
    tail = count % block + (block if count >= block and count % block < _GROUP else 0)
    left = words - tail * (words // count)
    scratch = torch.empty(min(left, block) // 2, dtype=torch.int64, device="cpu")
    while left > 0:
        scratch[: left // 2].random_(generator=generator)
        left -= 2 * scratch.numel()
    if tail:
        fill(torch.empty(tail, dtype=dtype, device="cpu"), generator)


def _same_in_blocks(fill: _Fill, dtype: torch.dtype) -> bool:
    """Compares the generator's state after whole and after blockwise draws of a few sizes."""
    for count in (1, *(groups * _GROUP + rest for groups in (2, 5) for rest in (-1, 0, 1, 15))):
        whole = torch.Generator().manual_seed(count)
        blockwise = torch.Generator().manual_seed(count)
        fill(torch.empty(count, dtype=dtype, device="cpu"), whole)
        _skip_in_blocks(fill, count, dtype, blockwise, 2 * _GROUP)
        if not torch.equal(whole.get_state(), blockwise.get_state()):
            return False
    return True
