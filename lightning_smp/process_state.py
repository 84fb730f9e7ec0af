"""The state of this process's run: the one mutable object of the library, which the API needs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_smp.calls import Calls
from lightning_smp.errors import SMPError
from lightning_smp.kept_groups import KeptGroups

if TYPE_CHECKING:
    from lightning_smp.config import SMPConfig
    from lightning_smp.failure import FailureWatch
    from lightning_smp.groups import Groups
    from lightning_smp.script.model import DistributedModel
    from lightning_smp.script.optimizer import DistributedOptimizer
    from lightning_smp.tensor_parallel.context import TensorParallel
    from lightning_smp.tensor_parallel.registry import Registration

__all__ = ["ModuleManager", "State", "state"]


@dataclass(frozen=True, slots=True)
class ModuleManager:
    """What Hugging Face's `save_pretrained` asks for.

    Attributes:
        translate_functions: (to Hugging Face's names, from them) by model family. Whole state
            dicts have the user's own names always, so there is nothing to translate.
    """

    translate_functions: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()


class State:
    """What `lightning_smp.rank()` and its like read.

    Attributes:
        cfg: the configuration of the run, None before it starts.
        device: this rank's device.
        backend: of groups that carry tensors, "nccl" or "gloo".
        tracing: whether a step is only analysed, on tensors without numbers.
        registrations: how modules of a class are distributed, by `smp.tp_register`.
        step_functions: how many functions `smp.step` has decorated.
        in_step: whether a function decorated with `smp.step` runs.
        module_manager: where clients look for translations of state dicts.
        calls: where this rank is in the run's collectives.
        kept: the process groups that later runs may use again.
        watch: over the run, or over the last one; None before the first.
        end: how the script came to its end, in words; None where that is not known.
    """

    def __init__(self) -> None:
        self.cfg: SMPConfig | None = None
        self._groups: Groups | None = None
        self.device = torch.device("cpu")
        self.backend = "gloo"
        self.tracing = False
        self.in_step = False
        self.step_functions = 0
        self.module_manager = ModuleManager()
        self.calls = Calls()
        self.kept = KeptGroups()
        self.watch: FailureWatch | None = None
        self.end: str | None = None
        self._model: weakref.ref[DistributedModel] | None = None
        self._optimizer: weakref.ref[DistributedOptimizer] | None = None
        self._tensor_parallel: TensorParallel | None = None
        self.registrations: dict[type, Registration] = {}

    @property
    def initialized(self) -> bool:
        """Whether the process groups exist."""
        return self._groups is not None

    @property
    def groups(self) -> Groups:
        """The process groups.

        Raises:
            SMPError: the run has not started.
        """
        if self._groups is None:
            raise SMPError(
                "a rank or group was asked for before the run started: call smp.init() first; in a "
                "LightningModule ranks exist from setup() on."
            )
        return self._groups

    @property
    def tensor_parallel(self) -> TensorParallel:
        """This rank's place in its tensor group; of degree 1 before the run starts."""
        from lightning_smp.tensor_parallel.context import TensorParallel

        if self._groups is None or self.cfg is None:
            return TensorParallel()
        if self._tensor_parallel is None:
            self._tensor_parallel = TensorParallel.over(
                self._groups.tp,
                prescaled=self.cfg.prescaled_batch,
                optimize=self.cfg.optimize,
            )
        return self._tensor_parallel

    @property
    def model(self) -> DistributedModel | None:
        """The script's distributed model, while it exists."""
        return None if self._model is None else self._model()

    @model.setter
    def model(self, model: DistributedModel) -> None:
        self._model = weakref.ref(model)

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank, the name of each parameter by its place in the model; alike on all ranks.

        Raises:
            SMPError: the run has not started, or there is no distributed model.
        """
        if self.model is None:
            raise SMPError(
                "the parameters' names were asked for before smp.DistributedModel was made."
            )
        names = [name for name, _ in self.model.named_parameters()]
        return [dict(enumerate(names)) for _ in range(self.groups.tp_size)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """By tp_rank, the place of each parameter by its name; see the other property."""
        return [{name: k for k, name in held.items()} for held in self.param_index_to_name_tp_group]

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The script's distributed optimizer, while it exists."""
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def replica_axis(self) -> Literal["pp", "mp"]:
        """The ranks that run a step together."""
        return "pp" if self.groups.tp_size == 1 else "mp"

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return int(os.environ.get("LOCAL_RANK", self.groups.rank))

    @property
    def local_size(self) -> int:
        """Number of processes on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.groups.world_size))

    def start(self, cfg: SMPConfig, groups: Groups, device: torch.device, backend: str) -> None:
        """A run starts; a later one takes its place."""
        self.cfg, self._groups, self.device, self.backend = cfg, groups, device, backend
        self._model = self._optimizer = None
        self._tensor_parallel = None


state = State()
"""The state of this process."""
