"""Splits a Hugging Face model over a tensor group, in place."""

from __future__ import annotations

from torch import nn

from lightning_smp.tensor_parallel.applying import apply_plan
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.huggingface import rules_of
from lightning_smp.tensor_parallel.masks import MaskWatch
from lightning_smp.tensor_parallel.plan import Plan, make_plan

__all__ = ["split_pretrained"]


def split_pretrained(model: nn.Module, tp: TensorParallel) -> tuple[Plan, str] | None:
    """Split what the model's own plan, or the rules for its type, say. Not a collective.

    Args:
        model: a Hugging Face model; its weights are the same on all ranks.
        tp: the tensor group.

    Returns:
        What was split, and where the rules come from; None if there are no rules for the model,
        which then stays as it is.

    Raises:
        UnsupportedError: the model's plan has a style that is not supported.
    """
    known = rules_of(model)
    if known is None:
        return None
    plan = make_plan(model, known.rules, tp.size, heads=known.heads, partners=known.family.partners)
    masks = MaskWatch(tp)
    if tp.gathers:
        model.register_forward_pre_hook(masks, with_kwargs=True)
    apply_plan(plan, tp, masks=masks, family=known.family)
    return plan, known.source
