"""Predicts memory and time of a training run from shapes alone, and searches the best degrees.

Nothing here needs a GPU, memory for the model, or a process group.
"""

from lightning_smp.planning.devices import DEVICES, Device
from lightning_smp.planning.estimate import Estimate, Estimator, Layout, Memory, Setup
from lightning_smp.planning.profile import Profile
from lightning_smp.planning.search import Found, search
from lightning_smp.planning.sources import Source, class_source, hugging_face_source
from lightning_smp.planning.text import describe

__all__ = [
    "DEVICES",
    "Device",
    "Estimate",
    "Estimator",
    "Found",
    "Layout",
    "Memory",
    "Profile",
    "Setup",
    "Source",
    "class_source",
    "describe",
    "hugging_face_source",
    "search",
]
