"""Loaders and batches under model parallelism: all ranks of a replica must hold the same batch."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_smp.errors import ConfigError
from lightning_smp.lightning.batch_broadcast import broadcast_batch

__all__ = ["broadcast_batch", "prepare_dataloader"]

Loader = TypeVar("Loader")
_logger = logging.getLogger(__name__)


def prepare_dataloader(
    loader: Loader, *, training: bool, drop_last: bool, dp_rank: int, seed_workers: bool
) -> Loader:
    """Returns a loader that gives the same batches to all ranks with one `dp_rank`.

    The loader itself is not changed: where something must differ, a shallow copy is returned, with
    the same dataset, samplers and class. What is not a `DataLoader` is returned as it is.

    * With `drop_last`, a training loader drops its last batch if that is short. It says so once
      per loader at INFO, with the number of samples. Loaders that never have a short batch
      (`batch_size` None or 1) and batch samplers without `drop_last` stay as they are.
    * With `seed_workers`, worker processes are seeded as Lightning does it, but by `dp_rank`
      instead of the global rank. A `worker_init_fn` of the user is left alone, as in Lightning.
      Without it, workers are seeded by torch, from the process's generator: equal on all ranks of
      a replica while their generators are.

    Args:
        loader: any iterable; only a `torch.utils.data.DataLoader` is looked at.
        training: whether it is the training loader.
        drop_last: the configuration's `drop_last`.
        dp_rank: which replica of the data this rank belongs to.
        seed_workers: whether the user called `seed_everything(..., workers=True)`.

    Raises:
        ConfigError: `drop_last` would leave no batch at all.
    """
    if not isinstance(loader, DataLoader):
        return loader
    changes: dict[str, Any] = {}
    if training and drop_last:
        changes.update(_drop_last_changes(loader))
    if seed_workers and loader.num_workers and loader.worker_init_fn is None:
        changes["worker_init_fn"] = _worker_init(dp_rank)
    return _changed_copy(loader, changes)


def _drop_last_changes(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the attributes that make `loader` drop a short last batch, if it may have one."""
    old: Any = loader.batch_sampler
    if old is None or getattr(old, "batch_size", None) == 1 or getattr(old, "drop_last", False):
        return {}
    new = _dropping(old)
    if new is None:
        _logger.info(
            "drop_last=True has no effect on the batch sampler %s: it has no `drop_last` that can "
            "be set. Its short batches are split as they are.",
            type(old).__qualname__,
        )
        return {}
    if isinstance(loader.dataset, IterableDataset):
        _logger.info(
            "drop_last=True: the training loader drops the short last batch of its iterable "
            "dataset (one per worker)."
        )
        return {"batch_sampler": new, "drop_last": True}
    _announce_dropped(old, new)
    # A loader that was given a batch sampler reports no batch size and no `drop_last` of its own.
    own = {"drop_last": True} if loader.batch_size is not None else {}
    return {"batch_sampler": new, **own}


def _dropping(batch_sampler: Any) -> Any | None:
    """Returns a copy of a batch sampler that drops its short last batch; None if it cannot."""
    if not isinstance(getattr(batch_sampler, "drop_last", None), bool):
        return None
    new = copy.copy(batch_sampler)
    try:
        new.drop_last = True
    except AttributeError:  # a property without setter
        return None
    return new


def _announce_dropped(old: Any, new: Any) -> None:
    try:
        before, after, samples = len(old), len(new), len(old.sampler)
    except (AttributeError, NotImplementedError, TypeError):
        _logger.info("drop_last=True: the training loader drops its short last batch.")
        return
    if before and not after:
        raise ConfigError(
            f"drop_last=True would drop all of the {samples} training samples of this rank: they "
            f"do not fill one batch. Use a batch size <= {samples}, more data, or drop_last=False."
        )
    if before == after:
        return
    if type(old) is BatchSampler:
        dropped = f"{samples - after * old.batch_size} of {samples} samples"
    else:
        dropped = f"{before - after} of {before} batches"
    _logger.info("drop_last=True: the training loader drops %s an epoch on this rank.", dropped)


def _changed_copy(loader: Loader, changes: dict[str, Any]) -> Loader:
    if not changes:
        return loader
    new = copy.copy(loader)
    # DataLoader refuses to set these attributes after __init__; the copy has no iterator yet.
    new.__dict__.update(changes, _iterator=None)
    return new


def _worker_init(dp_rank: int) -> Any:
    """Returns Lightning's own worker seeding for `dp_rank`, from the package that is in use."""
    in_use = "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules
    package = "lightning.fabric" if in_use else "lightning_fabric"
    seeding = importlib.import_module(f"{package}.utilities.seed")
    return partial(seeding.pl_worker_init_function, rank=dp_rank)
