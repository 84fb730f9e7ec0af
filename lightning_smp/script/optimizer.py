"""`smp.DistributedOptimizer`: a torch optimizer whose state dicts know the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_smp import optimizers
from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import ConfigError, SMPError, UnsupportedError
from lightning_smp.process_state import state
from lightning_smp.script.half import make_loss_scale
from lightning_smp.script.half_optimizer import HalfOptimizer
from lightning_smp.script.meeting import meeting
from lightning_smp.script.partial import PARTIAL_KEY, merge
from lightning_smp.script.resharding import RECORDS_KEY, records_of
from lightning_smp.tensor_parallel.record import Sharding
from lightning_smp.weights.checkpoint import gather_optimizer_state, load_optimizer_state
from lightning_smp.weights.collect import PipelineLinks
from lightning_smp.weights.elementwise import check_split_updates
from lightning_smp.wire import all_gather_objects

__all__ = ["DistributedOptimizer"]

_PLACES_KEY = "_smp_places"
"""In a part: the places in the groups of the parameters that it is about."""


class DistributedOptimizer(HalfOptimizer, torch.optim.Optimizer):
    """Wraps an optimizer; usable wherever torch wants one, in schedulers and scalers too.

    It shares groups and state with the wrapped optimizer.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        static_loss_scaling: float | None = None,
        dynamic_loss_scaling: bool | None = None,
        **dynamic_loss_options: Any,
    ) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: over the parameters of the distributed model; under tensor parallelism made
                after it.
            static_loss_scale: under `fp16`, the loss scale; None with a dynamic one. Without
                effect otherwise, like the following.
            dynamic_loss_scale: under `fp16`, whether the loss scale adapts to overflows.
            dynamic_loss_args: options of the dynamic loss scale.
            static_loss_scaling: another name of ``static_loss_scale``.
            dynamic_loss_scaling: another name of ``dynamic_loss_scale``.
            dynamic_loss_options: the options of ``dynamic_loss_args`` as keywords.

        Raises:
            ConfigError: it is no optimizer, or an unknown option.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"smp.DistributedOptimizer was given a {type(optimizer).__name__}; it wraps a "
                "torch.optim.Optimizer."
            )
        if static_loss_scaling is not None:
            static_loss_scale = static_loss_scaling
        self._scale = make_loss_scale(
            static_loss_scale, {**(dynamic_loss_args or {}), **dynamic_loss_options},
            is_dynamic=bool(dynamic_loss_scale or dynamic_loss_scaling),
        )  # fmt: skip
        self._masters = None
        self._scaled_backwards = 0
        self.optimizer = optimizer
        self._is_checked = False
        torch.optim.Optimizer.__setstate__(self, {})  # the hooks that torch keeps by instance
        state.optimizer = self

    # ---- shared with the wrapped one ----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, states: Any) -> None:
        self.optimizer.state = states

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, options: dict[str, Any]) -> None:
        self.optimizer.defaults = options

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # ---- steps --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters.

        Raises:
            SMPError: at the first step, the optimizer holds parameters that are not the model's.
            UnsupportedError: at the first step, it would update split parameters otherwise than
                whole ones.
        """
        self._check_parameters()
        if not self._is_half():
            return self.optimizer.step(closure)
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) with fp16=True: the closure's gradients would not be "
                "unscaled. Run the step function first, then optimizer.step()."
            )
        self._step_half()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        self.optimizer.zero_grad(set_to_none)
        if self._masters is not None:
            self._masters.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        self.optimizer.add_param_group(param_group)

    def _check_parameters(self) -> None:
        model = state.model
        if self._is_checked or model is None:
            return
        self._is_checked = True
        own = {id(parameter) for parameter in model.parameters()}
        held = [p for group in self.param_groups for p in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in held)
        if not foreign or state.groups.world_size == 1:
            self._check_updates()
            return
        raise SMPError(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the distributed "
            f"model's (tensor_parallel_degree={state.groups.tp_size}): it was made from the "
            "unwrapped model, whose modules have been replaced, or holds parameters of something "
            "else, which no rank would reduce. Make it after the model:\n"
            "    model = smp.DistributedModel(model)\n"
            f"    optimizer = smp.DistributedOptimizer({type(self.optimizer).__name__}"
            "(model.parameters(), ...))"
        )

    def _check_updates(self) -> None:
        deployment = self._deployment()
        if deployment is not None and type(self.optimizer).__module__ != optimizers.__name__:
            ownership = deployment.ownership  # ours refuse split weights themselves
            split = ownership.tensor.by_parameter
            check_split_updates([self.optimizer], split, ownership.name_of)

    # ---- what clients look at ------------------------------------------------------------------

    @property
    def redefined_params(self) -> bool:
        """Whether the groups hold other parameters than the script's; only sharding does that."""
        return False

    def _param_id_to_index(self) -> dict[int, int]:
        """By ``id`` of a parameter, its place in the groups, counted through."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        return {id(parameter): place for place, parameter in enumerate(held)}

    # ---- state dicts --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, on every rank of the pipeline.

        Collective over the pipeline: every rank with dp_rank 0 must call, or every rank.
        """
        deployment = self._deployment()
        with self._as_on_one_device() as more:
            if deployment is None or not deployment.holds_part:
                return {**self.optimizer.state_dict(), **more}
            links, ownership = _links(deployment), deployment.ownership
            with meeting("optimizer.state_dict()", state.replica_axis):
                found = [
                    gather_optimizer_state(self.optimizer, ownership, replace(links, writer=rank))
                    for rank in links.tp_rank_of
                ]
        return {**found[deployment.groups.mp_rank], **more}

    def orig_state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own state dict."""
        return self.optimizer.state_dict()

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of the parameters of this rank, with ``_smp_is_partial`` True.

        Not a collective.

        Args:
            gather_if_shard: for sharded optimizer states; there are none without sharding.
        """
        del gather_if_shard
        with self._as_on_one_device() as more:
            own = self.optimizer.state_dict()
            part = {**own, **more, PARTIAL_KEY: True, _PLACES_KEY: self._places()}
            records = records_of(self.split_places())
            return {**part, RECORDS_KEY: records} if records else part

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state, or this rank's part of one; before the split it waits for it.

        Args:
            state_dict: from `state_dict` or `local_state_dict`, or of the optimizer on one device.
        """
        model = state.model
        if model is not None and not model.partitioned:
            model.load_after_partition(lambda: self.load_state_dict(state_dict))
            return
        deployment = self._deployment()
        is_part = deployment is not None and deployment.holds_part
        if deployment is not None and is_part and state_dict.get(PARTIAL_KEY):
            state_dict = self._completed(state_dict, deployment)
        if self._is_half():
            self._load_half(_plain(state_dict))
        elif deployment is None or not is_part:
            self.optimizer.load_state_dict(_plain(state_dict))
        else:
            load_optimizer_state(self.optimizer, _plain(state_dict), deployment.ownership)

    def _completed(self, part: Mapping[str, Any], deployment: Deployment) -> Mapping[str, Any]:
        """The part, if each stage has its own; else all parts together."""
        control = deployment.groups.control
        with meeting("optimizer.load_state_dict()", "pp"):
            if all(all_gather_objects(part.get(_PLACES_KEY) == self._places(), control)):
                return part
            return merge(all_gather_objects(dict(part), control))  # type: ignore[no-any-return]

    def split_places(self) -> dict[int, Sharding]:
        """How the parameters are split over the tensor group, by place in the groups."""
        deployment = self._deployment()
        split = {} if deployment is None else deployment.ownership.tensor.by_parameter
        held = [p for group in self.param_groups for p in group["params"]]
        return {place: split[p] for place, p in enumerate(held) if p in split}

    def _places(self) -> list[int]:
        """Places in the groups, counted through, of the parameters that are real here."""
        deployment = self._deployment()
        held = [p for group in self.param_groups for p in group["params"]]
        if deployment is None:
            return list(range(len(held)))
        ownership = deployment.ownership
        return [place for place, p in enumerate(held) if p in ownership and ownership.is_local(p)]

    def _deployment(self) -> Deployment | None:
        model = state.model
        return None if model is None else model.deployment


def _links(deployment: Deployment) -> PipelineLinks:
    return PipelineLinks.over(deployment.groups, deployment.device)


def _plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    marks = (PARTIAL_KEY, _PLACES_KEY, RECORDS_KEY)
    return {key: state_dict[key] for key in state_dict if key not in marks}
