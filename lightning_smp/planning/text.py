"""A plan in words: what was found, where it goes, how it runs, or why it does not fit. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_smp.partitioning.report import report
from lightning_smp.planning.estimate import Estimate, Estimator, Layout, Memory
from lightning_smp.planning.search import Found
from lightning_smp.planning.sources import Source
from lightning_smp.schedule import draw

__all__ = ["describe"]

_GIB = 2**30
_MAX_STAGES_SHOWN = 64
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def describe(source: Source, estimator: Estimator, found: Found, *, width: int = 120) -> str:
    """Return the plan for people.

    Args:
        source: The model.
        estimator: What the search used.
        found: What it found.
        width: Columns of the picture.
    """
    parts = [_head(source, estimator)]
    if estimator.analysis.reason is not None:
        parts.append(
            f"Note: the step could not be analysed ({estimator.analysis.reason}). Neither times "
            "nor activations are known; layouts are compared by parameter counts."
        )
    if not found.best:
        parts.append(_does_not_fit(estimator, found))
        return "\n\n".join(parts) + "\n"
    best = found.best[0]
    parts += [
        _ranking(source, estimator, found),
        report(best.partition, source.root),
        _memory_table(best.memory),
        _picture(best, width),
        _arguments(best, estimator),
    ]
    return "\n\n".join(parts) + "\n"


def _head(source: Source, estimator: Estimator) -> str:
    setup = estimator.setup
    count = sum({id(p): p.numel() for p in source.root.parameters()}.values())
    return (
        f"{source.name}: {count:,} parameters, {source.precision}, {source.tokens:,} {source.unit} "
        f"a sample\n{setup.world_size} ranks with {_gib(setup.memory)} each, {setup.gpus_per_host} "
        f"a host; {setup.batch_size} samples a step"
    )


def _ranking(source: Source, estimator: Estimator, found: Found) -> str:
    head = ("pp", "tp", "dp", "virtual", "microbatches", "recompute", "step", "bubble", "memory")
    rows: list[tuple[str, ...]] = [(*head, f"{source.unit}/s")]
    is_known = estimator.analysis.reason is None
    for one in found.best:
        layout = one.layout
        samples_s = estimator.setup.batch_size / one.step_s if one.step_s else math.inf
        rows.append(
            (
                *map(str, (layout.pp, layout.tp, layout.dp, layout.virtual)),
                f"{layout.microbatches} x {layout.microbatch_size}",
                "yes" if layout.recompute else "no",
                _seconds(one.step_s) if is_known else "?",
                f"{one.bubble:.1%}",
                _gib(one.peak) if is_known else f"> {_gib(one.peak)}",
                f"{samples_s * source.tokens:,.0f}" if is_known else "?",
            )
        )
    title = f"Best of {found.num_tried} layouts (predicted):"
    return "\n".join([title, *_aligned(rows)])


def _memory_table(memory: Sequence[Memory]) -> str:
    rows: list[tuple[str, ...]] = [("stage", *_PARTS, "total")]
    for stage, one in enumerate(memory):
        rows.append((str(stage), *(_gib(getattr(one, part)) for part in _PARTS), _gib(one.total)))
    return "\n".join(["Peak memory of a rank, by stage:", *_aligned(rows)])


def _picture(best: Estimate, width: int) -> str:
    timeline = best.timeline
    if timeline is None or len(timeline.ranks) == 1:
        return "One stage: no pipeline, no bubble."
    lines = draw(timeline, max_width=width).splitlines()[1:]
    if len(lines) > _MAX_STAGES_SHOWN:
        lines = [*lines[:_MAX_STAGES_SHOWN], "..."]
    shown = sum(1 for span in timeline.ranks[0] if span.action.kind == "F") // best.layout.virtual
    more = ""
    if shown < best.layout.microbatches:
        more = f" (the first {shown} of {best.layout.microbatches} microbatches)"
    title = f"Schedule{more}, {timeline.name}; bubble of the whole step {best.bubble:.1%}:"
    return "\n".join([title, *lines])


def _arguments(best: Estimate, estimator: Estimator) -> str:
    layout = best.layout
    given = [
        f"pipeline_parallel_degree={layout.pp}",
        f"microbatches={layout.microbatches}",
        f'pipeline="{estimator.setup.pipeline}"',
        f"memory_weight={estimator.setup.memory_weight:g}",
    ]
    if layout.tp > 1:
        given += [f"tensor_parallel_degree={layout.tp}", "prescaled_batch=True"]
    if layout.virtual > 1:
        given.append(f"virtual_pipeline_degree={layout.virtual}")
    batch = layout.microbatches * layout.microbatch_size
    lines = [f"SMPStrategy(config=dict({', '.join(given)}))", f"batch size of a replica: {batch}"]
    if layout.recompute:
        lines.append("activation checkpointing of every unit: on")
    return "To use it:\n" + "\n".join(f"  {line}" for line in lines)


def _does_not_fit(estimator: Estimator, found: Found) -> str:
    setup, smallest = estimator.setup, found.smallest
    stage = max(range(len(smallest.memory)), key=lambda s: smallest.memory[s].total)
    worst = smallest.memory[stage]
    parts = ", ".join(f"{part} {_gib(getattr(worst, part))}" for part in _PARTS)
    lines = [
        f"Does not fit because every one of the {found.num_tried} layouts needs more than "
        f"{_gib(setup.memory)} on its fullest rank.",
        f"The smallest is {_named(smallest.layout)}: {_gib(worst.total)} on stage {stage} "
        f"({parts}).",
        _advice(worst, setup.memory, setup.world_size),
    ]
    return "\n".join(lines)


def _advice(worst: Memory, limit: float, world_size: int) -> str:
    state = worst.parameters + worst.gradients + worst.optimizer
    if state > limit:
        times = state / limit
        ranks = int(times * world_size) + 1
        return (
            f"Parameters, gradients and optimizer states alone are {times:.1f} times the limit: "
            f"use at least {ranks} ranks, a smaller optimizer (--optimizer), or 16-bit parameters "
            "(--precision bf16-true)."
        )
    return (
        "Without activations and buffers it would fit: make the sequences or the batch smaller, "
        "so that microbatches can be smaller, or use more ranks."
    )


def _named(layout: Layout) -> str:
    text = (
        f"pp={layout.pp}, tp={layout.tp}, dp={layout.dp}, virtual={layout.virtual}, "
        f"{layout.microbatches} microbatches of {layout.microbatch_size}"
    )
    return text + (", recomputed" if layout.recompute else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size < 100 * _GIB else f"{size / _GIB:.0f} GiB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.2f} ms"
