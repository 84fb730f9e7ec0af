"""Splits a Hugging Face model over a tensor group, in place."""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["pretrained_rule"]


def pretrained_rule(
    weights: Weights = "slice", *, root: nn.Module | None = None, only_marked: bool = False
) -> Rule:
    """Return the rule that splits Hugging Face models as their own plan or type says.

    It raises `UnsupportedError` for a plan with a style that is not supported.

    Args:
        weights: "slice": split modules keep their part of the weights; "reinit": fresh ones.
        root: the whole, whose other modules may share weights with such a model.
        only_marked: split what contexts have marked; otherwise all but what they have excluded.
    """

    def may_split(module: nn.Module) -> bool:
        mark = mark_of(module)
        return not only_marked if mark is None else mark.enabled

    def rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
        if not is_pretrained(module) or not any(map(may_split, module.modules())):
            return None
        if is_split(module, tp):  # by an earlier call of the trainer
            return InPlace(())
        return _split(name, module, tp, weights, root, may_split)

    return rule


def _split(
    name: str,
    model: nn.Module,
    tp: TensorParallel,
    weights: Weights,
    root: nn.Module | None,
    may_split: Callable[[nn.Module], bool],
) -> InPlace | Kept:
    """Splits what the model's own plan, or the rules for its type, say."""
    known = rules_of(model)
    if known is None:
        return Kept(
            f"{type(model).__name__} has no tp_plan, and there are no rules for its type "
            f"{model.config.model_type!r}; name patterns can split it"  # type: ignore[union-attr]
        )
    plan = make_plan(
        model, known.rules, tp.size, heads=known.heads, partners=known.family.partners,
        root=root, may_split=may_split,
    )  # fmt: skip
    result = describe(plan, name, known.source)
    if tp.gathers:
        model.register_forward_pre_hook(use_masks, with_kwargs=True)
    apply_plan(plan, tp, family=known.family)
    if weights == "reinit":
        spread = float(getattr(model.config, "initializer_range", 0.02))
        fresh_weights(plan, lambda weight: torch.nn.init.normal_(weight, 0.0, spread))
    return result
