"""`smp.utils`: the two helpers that published scripts import."""

from __future__ import annotations

from torch import Tensor

from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.module import shardings_of

__all__ = ["get_distribution_axis", "rmsg"]


def get_distribution_axis(tensor: Tensor) -> int | None:
    """Returns the dimension along which a parameter or buffer is split over the tensor group.

    None for one that every rank has whole.
    """
    model = state.model
    if model is None or state.groups.tp_size == 1:
        return None
    records = shardings_of(model.get_module())
    named = [*model.get_module().named_parameters(), *model.get_module().named_buffers()]
    name = next((name for name, held in named if held is tensor), None)
    return records[name].dim if name in records else None


def rmsg(message: object) -> str:
    """Returns a message with this rank in front."""
    return f"[{state.groups.rank}] {message}" if state.initialized else str(message)
