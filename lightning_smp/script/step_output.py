"""What a step gives back: one tensor per microbatch in a `StepOutput`, in the user's structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_smp.batch_tree import children_of, rebuild
from lightning_smp.errors import UnsupportedError

__all__ = ["StepOutput", "change_tensors", "join_results"]


_SETS: Final = (set, frozenset)


class StepOutput:
    """The tensors that one return value of a step had, by microbatch.

    Attributes:
        outputs: one tensor per microbatch.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Tensor:
        """The mean over the microbatches, in the shape of one of them."""
        return self.stack().mean(0)

    def reduce_sum(self) -> Tensor:
        """The sum over the microbatches, in the shape of one of them."""
        return self.stack().sum(0)

    def concat(self) -> Tensor:
        """The tensors one after the other along dimension 0, the batch.

        Raises:
            UnsupportedError: they have no dimension.
        """
        if any(output.dim() == 0 for output in self.outputs):
            raise UnsupportedError(
                "StepOutput.concat() of tensors without dimensions: there is no batch to join "
                "along. Use stack() to get one value per microbatch, or reduce_mean()."
            )
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """One tensor with the microbatches along a new dimension 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without graph."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def join_results(results: Sequence[Any]) -> Any:
    """Makes one return value of those of the microbatches.

    Tensors become a `StepOutput`. Dicts and their subclasses, lists, tuples, named tuples and
    dataclasses keep their type. What is None in every microbatch stays None, anything else becomes
    a list with one entry per microbatch; so does a container whose members differ, and a set.

    Args:
        results: one return value per microbatch, at least one.

    Raises:
        UnsupportedError: there is a set with tensors in it.
    """
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        return StepOutput(results)
    if all(result is None for result in results):
        return None
    if any(type(result) is not type(first) for result in results):
        return list(results)
    if isinstance(first, _SETS):
        for result in results:
            _check_set(result)
        return list(results)
    children = [children_of(result) for result in results]
    known = [part for part in children if part]
    if len(known) < len(results):  # leaves and empty containers
        return list(results)
    labels = [[child.label for child in part] for part in known]
    if any(label != labels[0] for label in labels):
        return list(results)
    items = [join_results([child.value for child in column]) for column in zip(*known, strict=True)]
    return rebuild(first, known[0], items)


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced, in a fixed order.

    Raises:
        UnsupportedError: there is a set with tensors in it.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _SETS):
        _check_set(value)
        return value
    children = children_of(value)
    if not children:
        return value
    items = [change_tensors(child.value, change) for child in children]
    if all(item is child.value for item, child in zip(items, children, strict=True)):
        return value
    return rebuild(value, children, items)


def _check_set(value: Any) -> None:
    """Tensors in a set come in another order in each microbatch and on each rank."""
    if _holds_tensor(value):
        raise UnsupportedError(
            f"A step returned a {type(value).__name__} with tensors in it: it has no order, so "
            "they cannot be matched over microbatches and ranks. Return a list, tuple or dict."
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return any(_holds_tensor(child.value) for child in children_of(value) or ())
