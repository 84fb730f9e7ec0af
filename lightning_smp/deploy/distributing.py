"""Splits the modules of a model over the tensor groups of a run, when the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import nn

from lightning_smp.config import SMPConfig
from lightning_smp.deploy.tensor_group import same_weights
from lightning_smp.groups import Groups
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.module import distributed_modules
from lightning_smp.tensor_parallel.patterns import pattern_rule
from lightning_smp.tensor_parallel.pretrained import pretrained_rule
from lightning_smp.tensor_parallel.replace import (
    Rule,
    distribute,
    marked_rule,
    registered_rule,
)

__all__ = ["distribute_model", "rules_of_config"]

_DONE: Final = "_smp_is_distributed"


def distribute_model(
    model: nn.Module,
    config: SMPConfig,
    groups: Groups,
    say: Callable[[str], None],
    rules: Sequence[Rule] | None = None,
) -> nn.Module:
    """Replace what rules name by distributed modules, before optimizers exist. Collective over tp.

    Args:
        model: the model; one that was given before stays as it is.
        config: the configuration.
        groups: the process groups; `process_state.state` must have been started with them.
        say: shows the report.
        rules: say what becomes of a module, from outermost in; by default the configuration's.

    Returns:
        The model; another object only if it was replaced as a whole.

    Raises:
        ConfigError: the weights of a module cannot be taken over.
        CommunicationError: the ranks of a tensor group built different models.
    """
    if groups.tp_size == 1 or _DONE in model.__dict__:
        return model
    if config.tensor_parallel_weights == "slice":
        same_weights(model, groups)
    given = rules_of_config(config, model) if rules is None else rules
    result, report = distribute(
        model, state.tensor_parallel, given, weights=config.tensor_parallel_weights
    )
    state.calls.trail.names = [name for name, _ in distributed_modules(result)]
    say(str(report))
    result.__dict__[_DONE] = True
    return result


def rules_of_config(config: SMPConfig, model: nn.Module) -> tuple[Rule, ...]:
    """Returns what ``tensor_parallel_modules`` asks for, for one model.

    Raises:
        ConfigError: an unknown style.
    """
    asked, weights = config.tensor_parallel_modules, config.tensor_parallel_weights
    if asked is None or isinstance(asked, str):
        pretrained = pretrained_rule(weights, root=model, only_marked=asked is None)
        return (registered_rule, pretrained, marked_rule)
    return (pattern_rule(asked, weights),)
