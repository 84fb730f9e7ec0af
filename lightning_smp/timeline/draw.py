"""Pictures of a measured step: SVG, pixels, and the trace format of Chrome and Perfetto. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lightning_smp.timeline.account import accounts, bubble
from lightning_smp.timeline.events import StepRecord

__all__ = ["chrome_trace", "pixels", "svg"]

_COLOURS = {"F": (86, 130, 189), "B": (214, 126, 68), "I": (214, 126, 68), "W": (117, 164, 96)}
_WAIT = (222, 222, 222)
_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_WIDTH, _ROW, _LEFT, _TOP = 1200, 28, 70, 34


def svg(ranks: Sequence[StepRecord], title: str) -> str:
    """A picture, time going right, one row a stage.

    Args:
        ranks: what each stage measured.
        title: what the step is called.
    """
    wall = max(rank.wall for rank in ranks)
    height = _TOP + _ROW * len(ranks) + 10
    found = accounts(ranks)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{title}: {wall * 1e3:.2f} ms, bubble {bubble(found):.1%}</text>',
    ]
    for stage, (rank, account) in enumerate(zip(ranks, found, strict=True)):
        y = _TOP + _ROW * stage
        idle = 1 - account.work / account.wall
        lines.append(f'<text x="4" y="{y + 16}">{stage}: idle {idle:.0%}</text>')
        for start, end, colour, text in _boxes(rank):
            x, width = _LEFT + start / wall * _WIDTH, max((end - start) / wall * _WIDTH, 0.2)
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}" '
                f'fill="rgb{colour}"><title>{text}</title></rect>'
            )
            if width > 14 and text[0] in "FBIW":
                lines.append(f'<text x="{x + 2:.2f}" y="{y + 15}">{text.split()[-1]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def pixels(ranks: Sequence[StepRecord], width: int = 1024, row: int = 24) -> torch.Tensor:
    """The same as pixels, for loggers that take images.

    Returns:
        uint8 [stages * row, width, 3].
    """
    wall = max(rank.wall for rank in ranks)
    image = torch.full((len(ranks) * row, width, 3), 255, dtype=torch.uint8)
    for stage, rank in enumerate(ranks):
        top = stage * row
        for start, end, colour, _ in _boxes(rank):
            left, right = int(start / wall * width), max(int(end / wall * width), 1)
            image[top + 2 : top + row - 2, left : max(right, left + 1)] = torch.tensor(
                colour, dtype=torch.uint8
            )
    return image


def chrome_trace(ranks: Sequence[StepRecord]) -> str:
    """A trace in the JSON format of chrome://tracing, times in microseconds."""
    events: list[dict[str, Any]] = []
    for stage, rank in enumerate(ranks):
        name = {"name": f"stage {stage}"}
        events.append({"ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": name})
        for start, end, _, text in _boxes(rank):
            events.append(
                {
                    "ph": "X", "pid": 0, "tid": stage, "name": text, "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _boxes(rank: StepRecord) -> list[tuple[float, float, tuple[int, int, int], str]]:
    """(start, end, colour, text): actions, and the waits on top of them."""
    boxes = [
        (s.start, s.end, _COLOURS[s.kind], f"{s.kind} {_NAMES[s.kind]} {s.microbatch}")
        for s in rank.spans
    ]
    return boxes + [
        (w.start, w.end, _WAIT, f"wait for stage {w.sender}, microbatch {w.microbatch}")
        for w in rank.waits
    ]
