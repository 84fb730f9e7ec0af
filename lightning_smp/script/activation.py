"""Activation checkpointing: modules that compute their activations again in the backward.

A module runs in `torch.utils.checkpoint`; inside a unit that is torch's own, between units the
run's replay (`placed.checkpointing`). What may share a region is decided when it runs, because
only then the stages are known.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import nn

from lightning_smp.errors import ConfigError, PartitionError
from lightning_smp.placed.units import entry_of
from lightning_smp.process_state import state

__all__ = ["checkpoint", "checkpoint_sequential", "set_activation_checkpointing"]

_log = logging.getLogger(__name__)
_GROUP: Final = re.compile(r"group_([1-9]\d*)")


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Lets this module keep only its inputs for the backward, which computes the rest again.

    Applies to the object, not its class. Call it on every rank, before the first step. Without
    gradients the module runs as always.

    Args:
        module: a module on one stage, or an `nn.Sequential` of such.
        preserve_rng_state: whether dropout is the same when the module runs again. Turn it off
            only where nothing is random.
        pack_args_as_tuple: for an `nn.Sequential` only. A tuple goes from one child to the next as
            one argument, as in `nn.Sequential` itself, whatever is given here.
        strategy: for an `nn.Sequential` only. What forms a region: "each" child; "contiguous",
            the neighbours on one stage; "group_x", x neighbours on one stage, a rest by itself.

    Raises:
        ConfigError: the arguments do not fit the module.
    """
    _check(module, strategy, pack_args_as_tuple)
    former = module.__dict__.get("forward")
    if isinstance(former, _Checkpointed):
        former.remove()
    if isinstance(module, nn.Sequential):
        forward = _CheckpointedSequential(module, preserve_rng_state, strategy)
        module.__dict__["forward"] = forward
    else:
        module.__dict__["forward"] = _Checkpointed(module, preserve_rng_state)


def checkpoint(
    module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module; it keeps only its inputs for the backward, which computes the rest again.

    Args:
        module: a module on one stage.
        args: its arguments.
        preserve_rng_state: whether dropout is the same when the module runs again.
        kwargs: its keyword arguments.

    Raises:
        ConfigError: `module` is no module.
        PartitionError: with `auto_partition=False`, it is on several stages. With automatic
            partition this is a warning, and the module runs without checkpointing.
    """
    _check(module, "each", False)
    return _run_region([module], module, args, kwargs, preserve_rng_state)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls an `nn.Sequential` region by region; see `set_activation_checkpointing`.

    Raises:
        ConfigError: the arguments do not fit the module.
        PartitionError: as in `checkpoint`, for a child.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise ConfigError(
            f"smp.checkpoint_sequential was given a {type(sequential_module).__name__}; it runs "
            f"an nn.Sequential. Use smp.checkpoint for other modules."
        )
    _check(sequential_module, strategy, pack_args_as_tuple)
    return _run_sequential(sequential_module, input, strategy, preserve_rng_state)


def regions_of(stages: list[int | None], strategy: str) -> list[int]:
    """Returns the number of neighbouring children in each region.

    Args:
        stages: stage of each child; None for one without weights, which runs where its input is.
        strategy: "each", "contiguous" or "group_x".
    """
    if strategy == "each":
        return [1] * len(stages)
    runs = [len(list(run)) for _, run in groupby(_with_neighbours(stages))]
    if strategy == "contiguous":
        return runs
    match = _GROUP.fullmatch(strategy)
    assert match is not None
    size = int(match[1])
    return [min(size, run - start) for run in runs for start in range(0, run, size)]


def stages_of(module: nn.Module) -> set[int]:
    """The stages of the units in a module; empty where the model is not split, or in a unit."""
    found = set()
    for inner in module.modules():
        entry = entry_of(inner)
        if entry is not None and entry.stage >= 0:
            found.add(entry.stage)
    return found


class _Checkpointed:
    """Stands in for the forward of a checkpointed module."""

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self._module = module
        self._preserve_rng_state = preserve_rng_state
        self._original: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run_region(
            [self._module], self._original, args, kwargs, self._preserve_rng_state
        )  # fmt: skip

    def remove(self) -> None:
        """Gives the module its forward back."""
        if getattr(self._original, "__self__", None) is self._module:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy, which the analysis makes of the model, runs plainly.
        copied = memo.get(id(self._module))
        return self._original if copied is None else _own_forward(copied)

    def __reduce__(self) -> Any:
        return (_own_forward, (self._module,))


class _CheckpointedSequential(_Checkpointed):
    """Stands in for the forward of an `nn.Sequential`, checkpointed region by region."""

    def __init__(self, module: nn.Sequential, preserve_rng_state: bool, strategy: str) -> None:
        super().__init__(module, preserve_rng_state)
        self._strategy = strategy

    def __call__(self, input: Any) -> Any:
        assert isinstance(self._module, nn.Sequential)
        return _run_sequential(self._module, input, self._strategy, self._preserve_rng_state)


def _run_sequential(
    module: nn.Sequential, value: Any, strategy: str, preserve_rng_state: bool
) -> Any:
    children = list(module)
    place = 0
    homes = [_home(child, index) for index, child in enumerate(children)]
    for count in regions_of(homes, strategy):
        region = children[place : place + count]
        place += count

        def run(value: Any, region: list[nn.Module] = region) -> Any:
            for child in region:
                value = child(value)
            return value

        value = _run_region(region, run, (value,), {}, preserve_rng_state)
    return value


def _run_region(
    modules: list[nn.Module],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
) -> Any:
    if not torch.is_grad_enabled() or not _is_on_one_stage(modules):
        return call(*args, **kwargs)
    return torch.utils.checkpoint.checkpoint(
        call, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )


def _is_on_one_stage(modules: list[nn.Module]) -> bool:
    """Whether a region may be one; says so, or refuses, where it may not."""
    stages = sorted(set().union(*map(stages_of, modules)))
    if len(stages) <= 1:
        return True
    cfg = state.cfg
    what = " and ".join(sorted({type(module).__name__ for module in modules}))
    if cfg is not None and not cfg.auto_partition:
        raise PartitionError(
            f"Activation checkpointing was asked for a {what} that lies on the stages {stages}; a "
            f"checkpointed module must lie on one. Checkpoint the modules inside it, or place them "
            f"on one stage (smp.set_partition)."
        )
    if not any(getattr(module, _WARNED, False) for module in modules):
        for module in modules:
            module.__dict__[_WARNED] = True
        _log.warning(
            "Activation checkpointing of a %s has no effect: the partition put it on the stages "
            "%s. Checkpoint the modules inside it.", what, stages,
        )  # fmt: skip
    return False


_WARNED: Final = "_smp_warned_of_checkpointing"


def _home(child: nn.Module, index: int) -> int | None:
    """The stage of a child, None if it has none; one of its own for a child on several stages."""
    stages = stages_of(child)
    if len(stages) > 1:
        return -1 - index
    return stages.pop() if stages else None


def _with_neighbours(stages: list[int | None]) -> Iterator[int | None]:
    """Lets a child without a stage of its own join the one before it."""
    before = next((stage for stage in stages if stage is not None), None)
    for stage in stages:
        before = before if stage is None else stage
        yield before


def _check(module: object, strategy: object, pack_args_as_tuple: bool) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"Activation checkpointing was asked for a {type(module).__name__}; it works on "
            f"instances of nn.Module. Put the function's code into a module."
        )
    if strategy == "each" and not pack_args_as_tuple:
        return
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"strategy={strategy!r}, pack_args_as_tuple={pack_args_as_tuple}: these are for an "
            f"nn.Sequential, and the module is a {type(module).__name__}. Leave them out."
        )
    known = strategy in ("each", "contiguous")
    if not known and not (isinstance(strategy, str) and _GROUP.fullmatch(strategy)):
        raise ConfigError(
            f'strategy={strategy!r} is none of "each", "contiguous" and "group_x" (x a number of '
            f'children). Use strategy="group_2", for example.'
        )


def _own_forward(module: nn.Module) -> Any:
    return type(module).forward.__get__(module)
