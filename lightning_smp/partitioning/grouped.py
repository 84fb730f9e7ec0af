"""Products of groups of rows with a matrix each, as mixtures of experts use them. Pure.

torch's fake result is there for bfloat16 alone, and its table of operations does not know them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["GROUPED", "grouped_flops", "grouped_result"]

GROUPED: Final = torch.ops.aten._grouped_mm
"""``_grouped_mm(self, mat2, offs)``: one of the three sizes of the product is cut at ``offs``."""


def grouped_result(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A tensor of the result's shape and type, without numbers."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim() == 2:  # the sum is cut: one product for each group
        assert offs is not None
        shape = (offs.shape[0], rows, columns)
    elif left.dim() == right.dim():
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def grouped_flops(left: Tensor, right: Tensor, *_: Any, **__: Any) -> float:
    """Multiplications and additions; each row, column or summand is in one group."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2.0 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]
