"""Splits the modules of a model over the tensor groups of a run, when the model is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lightning_smp.config import SMPConfig
from lightning_smp.deploy.tensor_group import same_weights
from lightning_smp.groups import Groups
from lightning_smp.process_state import state
from lightning_smp.tensor_parallel.module import distributed_modules
from lightning_smp.tensor_parallel.replace import (
    Rule,
    distribute,
    marked_rule,
    registered_rule,
)

__all__ = ["distribute_model"]

_RULES: tuple[Rule, ...] = (registered_rule, marked_rule)


def distribute_model(
    model: nn.Module,
    config: SMPConfig,
    groups: Groups,
    say: Callable[[str], None],
    rules: Sequence[Rule] = _RULES,
) -> nn.Module:
    """Replace what rules name by distributed modules, before optimizers exist. Collective over tp.

    Args:
        model: the model, whole on every rank; one that has distributed modules stays as it is.
        config: the configuration.
        groups: the process groups; `process_state.state` must have been started with them.
        say: shows the report.
        rules: say what becomes of a module, from outermost in.

    Returns:
        The model; another object only if it was replaced as a whole.

    Raises:
        ConfigError: the weights of a module cannot be taken over.
        CommunicationError: the ranks of a tensor group built different models.
    """
    if groups.tp_size == 1 or any(m.tp.size > 1 for _, m in distributed_modules(model)):
        return model
    if config.tensor_parallel_weights == "slice":
        same_weights(model, groups)
    result, report = distribute(
        model, state.tensor_parallel, rules, weights=config.tensor_parallel_weights
    )
    say(str(report))
    return result
