"""Measured timelines of training steps, in the Trainer's loggers and as files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_smp.timeline import StepRecord, accounts, bubble, chrome_trace, pixels, svg

__all__ = ["log_timeline"]

_logger = logging.getLogger(__name__)


def log_timeline(trainer: Any, folder: Path, records: Sequence[StepRecord]) -> None:
    """Logs a measured step; called on the rank that logs.

    Numbers, as shares of the wall time of all stages: ``smp/bubble`` and its parts
    ``smp/idle_warmup_drain``, ``smp/idle_imbalance``, ``smp/idle_communication``,
    ``smp/idle_host``; and ``smp/work_stage_N`` of each stage. A picture goes to loggers that take
    images; ``step_N.svg`` and ``step_N.json`` (a Chrome trace) are written.

    Args:
        trainer: the Trainer.
        folder: where the files go; made if it is not there.
        records: what each stage measured.
    """
    step = trainer.global_step
    numbers = _numbers(records)
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)
        _log_image(logger, records, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{step}.svg").write_text(svg(records, f"step {step}"), encoding="utf-8")
    (folder / f"step_{step}.json").write_text(chrome_trace(records), encoding="utf-8")
    parts = ", ".join(f"{name.rpartition('/')[2]} {share:.1%}" for name, share in numbers.items())
    _logger.info("timeline of step %d in %s: %s", step, folder, parts)


def _numbers(records: Sequence[StepRecord]) -> dict[str, float]:
    found = accounts(records)
    wall = sum(account.wall for account in found)
    numbers = {"smp/bubble": bubble(found)}
    for part in found[0].idle:
        numbers[f"smp/idle_{part}"] = sum(getattr(account, part) for account in found) / wall
    for stage, account in enumerate(found):
        numbers[f"smp/work_stage_{stage}"] = account.work / account.wall
    return numbers


def _log_image(logger: Any, records: Sequence[StepRecord], step: int) -> None:
    """Gives the picture to a logger in the way that it takes one, if it does."""
    if hasattr(logger, "log_image"):
        logger.log_image("smp/timeline", [pixels(records).numpy()], step=step)
    elif hasattr(getattr(logger, "experiment", None), "add_image"):
        logger.experiment.add_image("smp/timeline", pixels(records), step, dataformats="HWC")
