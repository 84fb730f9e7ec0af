"""The engine: runs the program of each microbatch by the schedule."""

from lightning_smp.engine.channels import Channels, Directions, make_directions
from lightning_smp.engine.control import Control
from lightning_smp.engine.engine import PipelineEngine
from lightning_smp.engine.plan import StepPlan

__all__ = [
    "Channels",
    "Control",
    "Directions",
    "PipelineEngine",
    "StepPlan",
    "make_directions",
]
