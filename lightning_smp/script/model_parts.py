"""A distributed model's parts: what this rank holds, state dicts of the part and of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smp.deploy.deployment import Deployment
from lightning_smp.errors import CheckpointError, SMPError
from lightning_smp.process_state import state
from lightning_smp.script.meeting import meeting
from lightning_smp.script.partial import PARTIAL_KEY, merge
from lightning_smp.script.resharding import RECORDS_KEY, records_of
from lightning_smp.weights.checkpoint import gather_state_dict, load_full_state_dict
from lightning_smp.weights.collect import PipelineLinks
from lightning_smp.wire import all_gather_objects

__all__ = ["LocalParts"]

_PREFIX = "module."


class LocalParts:
    """The methods of a distributed model about parts and the whole."""

    module: nn.Module
    deployment: Deployment
    _waiting_loads: list[Callable[[], None]]
    _is_on_host = False

    # ---- what this rank holds -----------------------------------------------------------------

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that are real on this rank; may be none.

        Raises:
            SMPError: the model is not split yet.
        """
        return (parameter for _, parameter in self.local_named_parameters(recurse=recurse))

    def local_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names, which are those of ``named_parameters()``."""
        ownership = self._require_split("local_named_parameters").ownership
        named = self.module.named_parameters(_joined(prefix), recurse)
        return ((name, p) for name, p in named if ownership.is_local(p))

    def local_buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers that are real on this rank; may be none."""
        return (buffer for _, buffer in self.local_named_buffers(recurse=recurse))

    def local_named_buffers(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The same with their names."""
        deployment = self._require_split("local_named_buffers")
        joined = _joined(prefix)
        for name, buffer in self.module.named_buffers(recurse=recurse):
            stages = deployment.ownership.stages_of_name(name)
            if stages is None or deployment.groups.pp_rank in stages:
                yield f"{joined}.{name}", buffer

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules that run on this rank: its units and what is around them; never others'."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """The same with their names."""
        self._require_split("local_named_modules")
        joined = _joined(prefix)
        foreign = self._foreign_modules()
        for name, module in self.module.named_modules():
            if name not in foreign:
                yield (f"{joined}.{name}" if name else joined), module

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What optimizers hold of this rank's parameters: without sharding, these themselves."""
        return self.local_named_parameters()

    def _foreign_modules(self) -> set[str]:
        """Names of modules that lie in other stages' units, or hold nothing but such units."""
        partition = self.deployment.partition
        if partition is None:
            return set()
        here = self.deployment.groups.pp_rank
        floating = set(partition.floating)
        inside: dict[str, bool] = {}
        for unit, stage in partition.stage_of.items():
            is_here = stage == here or unit in floating
            for name, _ in self.module.get_submodule(unit).named_modules(prefix=unit):
                inside[name] = is_here
            while "." in unit:
                unit = unit.rpartition(".")[0]
                inside[unit] = inside.get(unit, False) or is_here
        return {name for name, is_here in inside.items() if not is_here}

    def _require_split(self, what: str) -> Deployment:
        deployment = self.deployment
        if deployment.groups.pp_size > 1 and not deployment.is_split:
            raise SMPError(
                f"{what}() was called before the model was split, which the first step does. Use "
                "model.register_post_partition_hook(hook), or call it after the first step."
            )
        return deployment

    # ---- state dicts --------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict, with ``_smp_is_partial`` True.

        Before the split that is all of it. Not a collective.
        """
        deployment = self.deployment
        ownership = deployment.ownership
        records = records_of(ownership.tensor.shardings)
        marks = {PARTIAL_KEY: True, **({RECORDS_KEY: records} if records else {})}
        if deployment.runtime is None:
            return {**self.module.state_dict(), **marks}
        with deployment.gathering():
            entries = self.module.state_dict()
        local = {
            key: value
            for key, value in entries.items()
            if deployment.groups.pp_rank in ownership.stages_of_entry(key)
        }
        return {**local, **marks}

    def state_dict(  # type: ignore[override,unused-ignore]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole state dict, with the keys of the user's module.

        Collective over the pipeline: every rank with dp_rank 0 must call, or every rank.

        Args:
            args: as in torch, for wrappers of this model.
            gather_to_rank0: only global rank 0 gets it, the others an empty dict.
            kwargs: as in torch, for wrappers of this model.
        """
        deployment = self.deployment
        groups = deployment.groups
        if not deployment.holds_part:
            if gather_to_rank0 and groups.rank != 0:
                return {}
            return dict(self.module.state_dict(*args, **kwargs))
        links = PipelineLinks.over(groups, deployment.device)
        with meeting("model.state_dict()", state.replica_axis), deployment.gathering():
            if gather_to_rank0:
                return gather_state_dict(self.module, deployment.ownership, links)
            found = [
                gather_state_dict(self.module, deployment.ownership, replace(links, writer=rank))
                for rank in links.tp_rank_of
            ]
        return found[groups.mp_rank]

    def load_state_dict(  # type: ignore[override,unused-ignore]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Loads a whole state dict, or this rank's part of one.

        Collective over the pipeline for parts, unless ``same_partition_load``.

        Args:
            state_dict: from `state_dict`, from the module on one device (keys may carry the prefix
                ``module.``), or from `local_state_dict` on the same stage.
            strict: whether missing and unexpected keys are errors.
            same_partition_load: the part was made with the same split; it is loaded without asking
                the other stages. Before the first step it waits for the split.

        Returns:
            The missing and unexpected keys; None if the load waits.
        """
        entries = dict(state_dict)
        is_partial = bool(entries.pop(PARTIAL_KEY, False))
        entries.pop(RECORDS_KEY, None)
        if not is_partial or self.deployment.groups.pp_size == 1:
            return self._load_whole(self._own_names(entries), strict)
        if not same_partition_load:
            with meeting("model.load_state_dict()", "pp"):
                parts = all_gather_objects(entries, self.deployment.groups.control)
            whole = merge([{**part, PARTIAL_KEY: True} for part in parts])  # type: ignore[dict-item]
            whole.pop(PARTIAL_KEY)
            return self._load_whole(whole, strict)
        if not self.deployment.is_split:
            self._waiting_loads.append(lambda: self._load_part(entries, strict))
            return None
        return self._load_part(entries, strict)

    def _load_whole(self, entries: Mapping[str, Any], strict: bool) -> Any:
        result = load_full_state_dict(
            self.module, entries, self.deployment.ownership, strict=strict
        )
        if state.optimizer is not None:
            state.optimizer.follow_parameters()
        return result

    def _load_part(self, part: Mapping[str, Any], strict: bool) -> Any:
        with self.deployment.gathering():
            expected = {*self.local_state_dict()} - {PARTIAL_KEY, RECORDS_KEY}
            own = self.module.state_dict()
        missing, unexpected = sorted(expected - set(part)), sorted(set(part) - expected)
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"load_state_dict(same_partition_load=True): the part is of another split: it "
                f"lacks {missing[:5]} and has {unexpected[:5]} beside what stage "
                f"{self.deployment.groups.pp_rank} holds. Leave same_partition_load out."
            )
        known = {key: value for key, value in part.items() if key in own}
        # What this stage does not hold is there under its own, empty, value.
        return self._load_whole({**own, **known}, strict)

    def _own_names(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Entries with the names of the user's module, whether or not they carry the prefix."""
        own = [name for name, _ in self.module.named_parameters()]
        if all(name.startswith(_PREFIX) for name in own) or not entries:
            return entries
        if all(key.startswith(_PREFIX) for key in entries):
            return {key[len(_PREFIX) :]: value for key, value in entries.items()}
        return entries

    def gather_whole(self) -> None:
        """Makes the model whole again, on the host. Collective over the world."""
        if not self.deployment.is_split:
            self.deployment.to(torch.device("cpu"))
            self._is_on_host = self.deployment.groups.pp_size == 1  # else the split places it
            return
        whole = self.state_dict()
        self.deployment.undo()
        self.module.load_state_dict(whole)

    def leave_host(self) -> None:
        """With one stage, brings the model back to this rank's device, if `cpu` was called."""
        if self._is_on_host:
            self.deployment.to(self.deployment.device)
            self._is_on_host = False


def _joined(prefix: str) -> str:
    return f"{prefix}.module" if prefix else "module"
