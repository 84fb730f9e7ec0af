"""Splits a Hugging Face model over a tensor group, in place."""

from __future__ import annotations

import torch
from torch import nn

from lightning_smp.tensor_parallel.adopting import is_split
from lightning_smp.tensor_parallel.applying import apply_plan, fresh_weights
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.huggingface import is_pretrained, rules_of
from lightning_smp.tensor_parallel.marks import mark_of
from lightning_smp.tensor_parallel.masks import use_masks
from lightning_smp.tensor_parallel.plan import describe, make_plan
from lightning_smp.tensor_parallel.replace import Answer, InPlace, Kept, Rule, Weights

__all__ = ["pretrained_rule", "split_pretrained"]


def pretrained_rule(weights: Weights = "slice") -> Rule:
    """Return the rule that splits Hugging Face models as their own plan or type says.

    Args:
        weights: "slice": split modules keep their part of the weights; "reinit": fresh ones.
    """

    def rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
        mark = mark_of(module)
        if not is_pretrained(module) or (mark is not None and not mark.enabled):
            return None
        if is_split(module, tp):  # by an earlier call of the trainer
            return InPlace(())
        return split_pretrained(name, module, tp, weights=weights)

    return rule


def split_pretrained(
    name: str, model: nn.Module, tp: TensorParallel, *, weights: Weights = "slice"
) -> InPlace | Kept:
    """Split what the model's own plan, or the rules for its type, say. Not a collective.

    Args:
        name: dotted name of the model in the whole, "" for the whole.
        model: a Hugging Face model; its weights are the same on all ranks.
        tp: the tensor group.
        weights: see `pretrained_rule`.

    Returns:
        What was split and what was not, or why nothing was.

    Raises:
        UnsupportedError: the model's plan has a style that is not supported.
    """
    known = rules_of(model)
    if known is None:
        return Kept(
            f"{type(model).__name__} has no tp_plan, and there are no rules for its type "
            f"{model.config.model_type!r}; name patterns can split it"  # type: ignore[union-attr]
        )
    plan = make_plan(model, known.rules, tp.size, heads=known.heads, partners=known.family.partners)
    result = describe(plan, name, known.source)
    if tp.gathers:
        model.register_forward_pre_hook(use_masks, with_kwargs=True)
    apply_plan(plan, tp, family=known.family)
    if weights == "reinit":
        spread = float(getattr(model.config, "initializer_range", 0.02))
        fresh_weights(plan, lambda weight: torch.nn.init.normal_(weight, 0.0, spread))
    return result
