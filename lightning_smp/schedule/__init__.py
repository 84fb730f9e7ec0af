"""Schedules of a pipeline step as pure data: make, simulate, check, print and draw them.

Nothing in this package imports torch or communicates.
"""

from lightning_smp.schedule.actions import Action, ActionKind, Schedule
from lightning_smp.schedule.draw import draw, draw_svg
from lightning_smp.schedule.graph import Edge, Segment, SegmentGraph
from lightning_smp.schedule.messages import Channel, Message, list_channels
from lightning_smp.schedule.scheduler import PipelineKind, make_schedule
from lightning_smp.schedule.simulate import Span, Timeline, simulate
from lightning_smp.schedule.table import fit_schedule, read_schedule, write_schedule
from lightning_smp.schedule.validate import validate

__all__ = [
    "Action",
    "ActionKind",
    "Channel",
    "Edge",
    "Message",
    "PipelineKind",
    "Schedule",
    "Segment",
    "SegmentGraph",
    "Span",
    "Timeline",
    "draw",
    "draw_svg",
    "fit_schedule",
    "list_channels",
    "make_schedule",
    "read_schedule",
    "simulate",
    "validate",
    "write_schedule",
]
