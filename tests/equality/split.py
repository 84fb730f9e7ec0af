"""A reference that cuts every batch as the smp strategy does, in one process and without it.

``SplitStrategy`` runs the user's step once per replica and microbatch, in order, and returns the
weighted mean of the losses: one autograd graph, no communication. It is the oracle for steps whose
loss depends on the cut, and it proves for the others that it does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.devices import ONE_DEVICE

__all__ = ["SplitStrategy", "rows"]

_COMBINE: dict[str, Callable[[list[tuple[float, Any]]], Any]] = {
    "mean": lambda entries: sum(w * v for w, v in entries) / sum(w for w, _ in entries),
    "sum": lambda entries: sum(v for _, v in entries),
    "max": lambda entries: max(v for _, v in entries),
    "min": lambda entries: min(v for _, v in entries),
}


class SplitStrategy(SingleDeviceStrategy):
    """One device that accumulates over ``num_replicas`` x ``num_microbatches`` parts of a batch.

    A replica takes every ``num_replicas``-th sample, as a DistributedSampler deals them; a
    microbatch is a contiguous piece of a replica's samples, sizes differing by one at most.
    """

    def __init__(self, *, num_microbatches: int, num_replicas: int = 1) -> None:
        super().__init__(device=ONE_DEVICE)
        self.num_microbatches = num_microbatches
        self.num_replicas = num_replicas

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's loss over all parts, or None if every part returned None.

        What a step returns beside its loss is passed on from the last part.
        """
        module = self.lightning_module
        assert isinstance(module, pl.LightningModule)
        if not module.automatic_optimization or self._num_parts == 1:
            return super().training_step(*args, **kwargs)
        batch, *others = args
        losses: list[tuple[float, Tensor]] = []
        with _collected_logs(module) as logs:
            for part in self._parts(batch):
                logs.weight = _num_samples(part)
                output = super().training_step(part, *others, **kwargs)
                losses.extend(_weighted_loss(output, logs.weight))
        logs.replay()
        if not losses:
            return None
        total = sum(weight for weight, _ in losses)
        loss = sum(loss * (weight / total) for weight, loss in losses)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    @property
    def _num_parts(self) -> int:
        return self.num_microbatches * self.num_replicas

    def _parts(self, batch: Any) -> Iterator[Any]:
        count = _num_samples(batch)
        for replica in range(self.num_replicas):
            own = torch.arange(replica, count, self.num_replicas)
            for piece in own.tensor_split(self.num_microbatches):
                if piece.numel() > 0:
                    yield rows(batch, piece)


class _Logs:
    """Values logged by the parts of one batch, to be logged once."""

    def __init__(self, log: Callable[..., None]) -> None:
        self.weight = 1
        self._log = log
        self._values: defaultdict[str, list[tuple[float, Any]]] = defaultdict(list)
        self._options: dict[str, dict[str, Any]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Keep a value instead of logging it."""
        self._values[name].append((self.weight, value))
        self._options[name] = options

    def replay(self) -> None:
        """Log every name once, its values combined as its reduction says."""
        for name, entries in self._values.items():
            options = dict(self._options[name])
            options.pop("batch_size", None)
            total = sum(weight for weight, _ in entries)
            first = entries[0][1]
            if isinstance(first, Tensor | float | int):
                first = _COMBINE[options.get("reduce_fx", "mean")](entries)
            self._log(name, first, batch_size=total, **options)


@contextmanager
def _collected_logs(module: pl.LightningModule) -> Iterator[_Logs]:
    logs = _Logs(module.log)
    module.__dict__["log"] = logs.log
    try:
        yield logs
    finally:
        del module.__dict__["log"]


def _weighted_loss(output: Any, num_samples: int) -> list[tuple[float, Tensor]]:
    if output is None:
        return []
    if isinstance(output, Tensor):
        return [(num_samples, output)]
    return [(float(output.get("loss_weight", num_samples)), output["loss"])]


def _num_samples(batch: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def rows(batch: Any, indices: Tensor) -> Any:
    """Return the samples of a batch at the given indices; a list of texts is cut too."""
    count = _num_samples(batch)
    if isinstance(batch, dict):
        return {key: rows_of_value(value, indices, count) for key, value in batch.items()}
    return tree_map(lambda value: rows_of_value(value, indices, count), batch)


def rows_of_value(value: Any, indices: Tensor, count: int) -> Any:
    """Return one entry of a batch at the given indices, or as it is when it has no samples."""
    if isinstance(value, Tensor) and value.ndim > 0:
        return value[indices]
    if isinstance(value, list) and len(value) == count:
        return [value[index] for index in indices.tolist()]
    return value
