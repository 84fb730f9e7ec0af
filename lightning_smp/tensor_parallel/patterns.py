"""Splits a user's own modules over a tensor group, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

import torch
from torch import nn

from lightning_smp.errors import ConfigError
from lightning_smp.tensor_parallel.adopting import is_split
from lightning_smp.tensor_parallel.applying import apply_plan, fresh_weights
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.plan import Plan, Style, describe, make_plan
from lightning_smp.tensor_parallel.plan import Rule as PlanRule
from lightning_smp.tensor_parallel.replace import Answer, InPlace, Rule, Weights

__all__ = ["pattern_rule", "read_patterns"]

_STYLES: Final = {
    "column": Style.COLUMN,
    "row": Style.ROW,
    "embedding": Style.EMBEDDING,
    "vocab": Style.VOCAB,
    "block": Style.BLOCK,
}


def pattern_rule(patterns: Mapping[str, str], weights: Weights = "slice") -> Rule:
    """Return the rule that splits the modules whose dotted names match.

    Args:
        patterns: name pattern (``*`` stands for anything) to style. ``column`` and ``row`` split a
            linear layer's outputs and inputs, and what lies between works on slices; ``column:3``
            has three fused blocks (query, key and value). ``embedding`` and ``vocab`` split the
            vocabulary of an embedding and a head. ``block`` is a module around column-wise layers
            whose inputs are brought together, which attention needs, as it looks at shapes.
        weights: "slice": split modules keep their part of the weights; "reinit": fresh ones.

    Raises:
        ConfigError: an unknown style.
    """
    rules = read_patterns(patterns)

    def rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
        if name:
            return None  # it has looked at everything when it was asked for the whole
        if is_split(module, tp):  # by an earlier call of the trainer
            return InPlace(())
        _check_matches(module, rules)
        plan = make_plan(module, rules, tp.size)
        _check_kept(plan)
        result = describe(plan, "", "tensor_parallel_modules")
        apply_plan(plan, tp)
        if weights == "reinit":
            fresh_weights(plan, lambda weight: torch.nn.init.kaiming_uniform_(weight, 5**0.5))
        return result

    return rule


def read_patterns(patterns: Mapping[str, str]) -> tuple[PlanRule, ...]:
    """Returns the rules that patterns stand for.

    Raises:
        ConfigError: an unknown style, or a number of blocks where none can be.
    """
    return tuple(_read(pattern, style) for pattern, style in patterns.items())


def _read(pattern: str, style: str) -> PlanRule:
    name, _, blocks = style.partition(":")
    if name not in _STYLES or (blocks and not (name == "column" and blocks.isdecimal())):
        raise ConfigError(
            f"tensor_parallel_modules={{{pattern!r}: {style!r}}}: styles are "
            f"{', '.join(_STYLES)} and column:N for N fused blocks."
        )
    return PlanRule(pattern, _STYLES[name], blocks=int(blocks or 1), by_user=True)


def _check_matches(model: nn.Module, rules: tuple[PlanRule, ...]) -> None:
    names = [name for name, _ in model.named_modules() if name]
    for rule in rules:
        if not any(rule.matches(name) for name in names):
            close = get_close_matches(rule.pattern, names, n=1, cutoff=0.3)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"tensor_parallel_modules: the pattern {rule.pattern!r} matches no module.{hint}"
            )


def _check_kept(plan: Plan) -> None:
    """A layer that stays whole leaves its counterpart with slices that nobody makes."""
    paired = (Style.COLUMN, Style.ROW)
    if any(split.rule.style in paired for split in plan.splits.values()) and plan.whole:
        name, reason = next(iter(plan.whole.items()))
        raise ConfigError(
            f"tensor_parallel_modules: {name!r} cannot be split, because {reason}; a layer that "
            "works with it would be. Leave both out."
        )
