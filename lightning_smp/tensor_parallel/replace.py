"""Replaces modules by distributed ones, in place, from outermost in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lightning_smp.deferred import default_dtype, deferring, is_deferred
from lightning_smp.errors import ConfigError
from lightning_smp.placed.random import Guard, isolated_draws, mix_seed
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.marks import mark_of
from lightning_smp.tensor_parallel.module import DistributedModule, number_modules
from lightning_smp.tensor_parallel.registry import HookedForward, construct, registered

__all__ = [
    "InPlace",
    "Kept",
    "Replacement",
    "Report",
    "Rule",
    "distribute",
    "marked_rule",
    "registered_rule",
]

Weights: TypeAlias = Literal["slice", "reinit"]


@dataclass(frozen=True)
class Kept:
    """A module that was to be distributed stays whole, and why."""

    reason: str


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a module.

    Attributes:
        module: the distributed module; its weights are filled by `distribute` unless `has_weights`.
        has_weights: it holds its part of the original's weights already.
    """

    module: DistributedModule
    has_weights: bool = False


@dataclass(frozen=True)
class InPlace:
    """A module has been split by changing its own modules, weights included.

    Attributes:
        distributed: (name, class, how) of each, for the report.
        kept: (name, class, why) of what was to be split and was not.
    """

    distributed: tuple[tuple[str, str, str], ...]
    kept: tuple[tuple[str, str, str], ...] = ()


Answer: TypeAlias = "Replacement | InPlace | Kept | None"
Rule: TypeAlias = Callable[[str, nn.Module, TensorParallel], Answer]
"""Says what becomes of a module, by its dotted name; None: nothing to say, look inside."""


@dataclass(frozen=True)
class Report:
    """What was distributed and what was not.

    Attributes:
        distributed: (name, class, distributed class) in module order.
        kept: (name, class, reason) of modules that were to be distributed.
    """

    distributed: tuple[tuple[str, str, str], ...]
    kept: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        lines = [f"Tensor parallelism: {len(self.distributed)} modules are distributed."]
        lines += [f"  {name or '(model)'}: {old} -> {new}" for name, old, new in self.distributed]
        lines += [
            f"  {name or '(model)'}: {old} stays whole: {why}" for name, old, why in self.kept
        ]
        return "\n".join(lines)


def distribute(
    model: nn.Module,
    tp: TensorParallel,
    rules: Sequence[Rule] | None = None,
    *,
    weights: Weights = "slice",
) -> tuple[nn.Module, Report]:
    """Replace the modules that rules name by distributed ones; not a collective.

    All ranks of the tensor group must hold equal weights (`deploy.tensor_group.same_weights`).
    Of nested modules the outermost is replaced. Every reference to a replaced module in the tree
    then leads to the new one.

    Args:
        model: the model, whole.
        tp: the tensor group.
        rules: asked in this order for each module; by default what contexts have marked.
        weights: "slice": new modules take their part of the original's; "reinit": fresh ones.

    Returns:
        The model (another object if it was replaced itself) and what was done.

    Raises:
        ConfigError: the weights of a module cannot be taken over.
    """
    given = (marked_rule,) if rules is None else tuple(rules)
    worker = _Worker(model, tp, (_early_rule, *given), weights)
    result = worker.run()
    number_modules(result)
    return result, Report(tuple(worker.distributed), tuple(worker.kept))


def marked_rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
    """Distribute what the contexts have marked, if its class is supported."""
    mark = mark_of(module)
    if mark is None or not mark.enabled:
        return None
    return _by_class(module, tp, mark.arguments)


def registered_rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
    """Distribute what the user has registered, unless it was marked as not to be."""
    mark = mark_of(module)
    if mark is not None and not mark.enabled:
        return None
    if registered(module) is None:
        return None
    return _by_class(module, tp, {} if mark is None else mark.arguments)


def _early_rule(name: str, module: nn.Module, tp: TensorParallel) -> Answer:
    """Make distributed modules anew that were made before the run started, for one rank."""
    if not isinstance(module, DistributedModule):
        return None
    try:
        return Replacement(module.made_for(tp))
    except ConfigError as error:
        return Kept(str(error))


def _by_class(
    module: nn.Module, tp: TensorParallel, arguments: Mapping[str, Any]
) -> Replacement | Kept | None:
    from lightning_smp.nn.standard import from_standard  # it builds on this package

    registration = registered(module)
    try:
        if registration is None:
            made = from_standard(module, tp)
            return None if made is None else Replacement(made)
        new = construct(registration, module, arguments)
    except ConfigError as error:
        return Kept(str(error))
    HookedForward(new, registration).install()
    return Replacement(new)


class _Worker:
    """One walk over a model."""

    def __init__(
        self, model: nn.Module, tp: TensorParallel, rules: tuple[Rule, ...], weights: Weights
    ) -> None:
        self._model = model
        self._tp = tp
        self._rules = rules
        self._weights = weights
        self._seen: set[int] = set()
        self._new: dict[int, DistributedModule] = {}
        self._originals: list[nn.Module] = []  # so that no id is used again
        self.distributed: list[tuple[str, str, str]] = []
        self.kept: list[tuple[str, str, str]] = []

    def run(self) -> nn.Module:
        if self._tp.size > 1:
            self._visit("", self._model)
        for module in [self._model, *self._new.values()]:
            _redirect(module, self._new)
        return self._new.get(id(self._model), self._model)

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if isinstance(module, DistributedModule) and module.tp.size == self._tp.size:
            return
        if self._replace(name, module):
            return
        for local, child in module.named_children():
            self._visit(f"{name}.{local}" if name else local, child)

    def _replace(self, name: str, module: nn.Module) -> bool:
        for rule in self._rules:
            with self._construction(module):
                answer = rule(name, module, self._tp)
            if answer is None:
                continue
            if isinstance(answer, Replacement) and (shared := self._shared_with(name, module)):
                answer = Kept(f"it shares weights with {shared}")
            if isinstance(answer, Kept):
                self.kept.append((name, type(module).__name__, answer.reason))
                return False
            if isinstance(answer, InPlace):
                self.distributed += answer.distributed
                self.kept += answer.kept
            else:
                self._take(name, module, answer)
            return True
        return False

    def _take(self, name: str, module: nn.Module, answer: Replacement) -> None:
        new = answer.module
        if not answer.has_weights and self._weights == "slice":
            _slice_weights(name, module, new)
        new.train(module.training)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(new, hooks).update(getattr(module, hooks))
        self._new[id(module)] = new
        self._originals.append(module)
        self._seen.update(id(inner) for inner in module.modules())
        self.distributed.append((name, type(module).__name__, type(new).__name__))

    @contextmanager
    def _construction(self, module: nn.Module) -> Iterator[None]:
        """Construct like the original: its dtype and device, and other random numbers per rank."""
        tensor = next(module.parameters(), None)
        is_float = tensor is not None and tensor.is_floating_point()
        dtype = tensor.dtype if is_float else torch.get_default_dtype()
        seed = mix_seed(torch.initial_seed(), self._tp.rank, len(self.distributed))
        device = torch.device("cpu") if tensor is None else tensor.device
        lazily = deferring() if is_deferred(tensor) else nullcontext()
        draws = isolated_draws(seed, device, Guard.ALL)
        with default_dtype(dtype), device, draws, lazily:
            yield

    def _shared_with(self, name: str, module: nn.Module) -> str | None:
        """Return a module outside of `module` that holds one of its parameters."""
        own = {id(p) for p in module.parameters()}
        inside = {id(inner) for inner in module.modules()}
        for other_name, other in self._model.named_modules():
            if id(other) in inside:
                continue
            if any(id(p) in own for p in other.parameters(recurse=False)):
                return repr(other_name)
        return None


def _slice_weights(name: str, module: nn.Module, new: DistributedModule) -> None:
    try:
        with torch.no_grad():
            new.load_full(module.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            f"The weights of {name!r} ({type(module).__name__}) cannot be taken over by "
            f"{type(new).__name__}: {error}. Give the distributed module a from_original that "
            'translates the state dict, or use tensor_parallel_weights="reinit".'
        ) from error
    frozen = {key for key, p in module.named_parameters() if not p.requires_grad}
    for key, parameter in new.named_parameters():
        if key in frozen:
            parameter.requires_grad_(False)


def _redirect(root: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Let everything in the tree that referred to a replaced module refer to the new one."""
    for module in root.modules():
        for holder in (module._modules, module.__dict__):
            for key, value in list(holder.items()):
                if isinstance(value, nn.Module) and id(value) in new:
                    holder[key] = new[id(value)]
