"""What each rank of a pipeline did during one step, measured: numbers, pictures and traces."""

from lightning_smp.timeline.account import Account, accounts, bubble
from lightning_smp.timeline.clock import StepClock
from lightning_smp.timeline.draw import chrome_trace, pixels, svg
from lightning_smp.timeline.events import Span, StepRecord, Wait

__all__ = [
    "Account",
    "Span",
    "StepClock",
    "StepRecord",
    "Wait",
    "accounts",
    "bubble",
    "chrome_trace",
    "pixels",
    "svg",
]
