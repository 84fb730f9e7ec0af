"""Pictures of a simulated schedule: text for terminals and logs, SVG for documents."""

import math
from html import escape

from lightning_smp.schedule.actions import Action
from lightning_smp.schedule.simulate import Span, Timeline

__all__ = ["draw", "draw_svg"]

_SVG_WIDTH = 960
_SVG_ROW = 26
_SVG_MARGIN = 60
_FILL = {"F": ">", "B": "<", "I": "<", "W": "="}
_COLORS = {"F": "#9ecae1", "B": "#fdae6b", "I": "#fdd0a2", "W": "#a1d99b"}


def draw(timeline: Timeline, *, max_width: int = 120) -> str:
    """Draw the timeline as text, time going right, one row per rank.

    An action begins with its name (its kind, the microbatch, and where a rank has several segments
    a dot and the segment) and is filled up with ``>`` (F), ``<`` (B and I) or ``=`` (W); dots are
    idle time.

    Args:
        timeline: What to draw.
        max_width: Most columns for the time axis; a name that does not fit becomes its letter.
    """
    columns = _columns(timeline, max_width)
    scale = columns / timeline.makespan if timeline.makespan > 0.0 else 0.0
    lines = [f"{timeline.name}: makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}"]
    for rank, spans in enumerate(timeline.ranks):
        row = ["."] * columns
        for span in spans:
            first, last = round(span.start * scale), round(span.end * scale)
            row[first:last] = _bar(span.action, _label(span.action, spans), last - first)
        lines.append(
            f"rank {rank:<3}|{''.join(row)}| idle {timeline.idle_share[rank]:.0%}, "
            f"live {timeline.peak_live[rank]}"
        )
    return "\n".join(lines)


def draw_svg(timeline: Timeline) -> str:
    """Draw the timeline as a stand-alone SVG image, one row per rank, times as tool tips."""
    scale = (_SVG_WIDTH - _SVG_MARGIN) / timeline.makespan if timeline.makespan > 0.0 else 0.0
    height = _SVG_ROW * (len(timeline.ranks) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="4" y="16">{escape(timeline.name)}: makespan {timeline.makespan:g}, '
        f"bubble {timeline.bubble:.1%}</text>",
    ]
    for rank, spans in enumerate(timeline.ranks):
        top = _SVG_ROW * (rank + 1)
        parts.append(f'<text x="4" y="{top + 16}">rank {rank}</text>')
        parts += [_svg_span(span, _label(span.action, spans), top, scale) for span in spans]
    return "\n".join([*parts, "</svg>"])


def _columns(timeline: Timeline, max_width: int) -> int:
    """Columns for the time axis: no more than it takes to show the shortest action's name."""
    spans = [(span, spans) for spans in timeline.ranks for span in spans if span.end > span.start]
    if not spans:
        return 0
    needed = max(
        len(_label(span.action, row)) * timeline.makespan / (span.end - span.start)
        for span, row in spans
    )
    return min(max_width, math.ceil(needed))


def _bar(action: Action, label: str, width: int) -> str:
    text = label if len(label) <= width else action.kind
    return text.ljust(width, _FILL[action.kind])[:width]


def _label(action: Action, spans: tuple[Span, ...]) -> str:
    is_only = all(span.action.segment == action.segment for span in spans)
    return f"{action.kind}{action.microbatch}" if is_only else str(action)


def _svg_span(span: Span, label: str, top: int, scale: float) -> str:
    left, width = _SVG_MARGIN + span.start * scale, (span.end - span.start) * scale
    return (
        f"<g><title>{span.action}: {span.start:g} to {span.end:g}</title>"
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_SVG_ROW - 4}" '
        f'fill="{_COLORS[span.action.kind]}" stroke="#555"/>'
        f'<text x="{left + 2:.1f}" y="{top + 15}">{label}</text></g>'
    )
