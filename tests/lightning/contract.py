"""Runs the same scenario with plain Lightning on one device and with the smp strategy on ranks.

A scenario is a module-level function from a `Bench` to plain data (numbers, strings, tensors, lists
and dicts of these). It makes its Trainers through the bench and knows nothing else of the strategy,
so that whatever differs between the two runs is the strategy's doing. Many scenarios share one
start of the ranks, which costs more than they do.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.launch import RankFailure, run_ranks

__all__ = [
    "FEATURES",
    "Bench",
    "GradientWatcher",
    "Layout",
    "ManualWithCritic",
    "Model",
    "Results",
    "Scenario",
    "Twice",
    "assert_close",
    "loader",
    "points",
    "weights",
]

FEATURES = 6
_CLASSES = 3


@dataclass(frozen=True)
class Layout:
    """Degrees and options of the strategy."""

    pp: int = 2
    dp: int = 1
    microbatches: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp


@dataclass(frozen=True)
class Bench:
    """Makes the Trainers of a scenario: on one device (`layout` is None), or on ranks."""

    layout: Layout | None = None
    rank: int = 0

    @property
    def dp(self) -> int:
        """Number of replicas, over which a global batch is divided."""
        return self.layout.dp if self.layout else 1

    @property
    def dp_rank(self) -> int:
        """The replica that this rank belongs to, in the default placement."""
        return self.rank // self.layout.pp if self.layout else 0

    @property
    def is_smp(self) -> bool:
        """Whether this is the run under test."""
        return self.layout is not None

    def loader(self, count: int = 16, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
        """Returns a loader of points in order; batch i is the same over all replicas together."""
        if self.dp > 1:
            batch_size //= self.dp
            data = points(count)
            sampler = DistributedSampler(data, self.dp, self.dp_rank, shuffle=False)
            return DataLoader(data, batch_size, sampler=sampler, **options)
        return loader(count, batch_size, **options)

    def trainer(self, *, smp: Mapping[str, Any] | None = None, **options: Any) -> pl.Trainer:
        """Returns a quiet Trainer; `smp` holds further arguments of the strategy."""
        defaults = {
            "accelerator": "cpu",
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return pl.Trainer(**{**defaults, **self._strategy(smp or {}), **options})

    def _strategy(self, smp: Mapping[str, Any]) -> dict[str, Any]:
        if self.layout is None:
            return {"devices": 1}
        from lightning_smp import SMPStrategy

        arguments = {
            "pipeline_parallel_degree": self.layout.pp,
            "microbatches": self.layout.microbatches,
            "timeout": 20,
            **self.layout.options,
            **smp,
        }
        return {"strategy": SMPStrategy(**arguments), "devices": self.layout.world_size}


Scenario = Callable[[Bench], Any]


@dataclass
class Results:
    """What scenarios gave on every rank; an error's text where one did not end well."""

    of: dict[str, list[Any] | str]

    @classmethod
    def collect(
        cls, scenarios: Sequence[Scenario], layout: Layout, *, timeout: float = 240, **options: Any
    ) -> Results:
        """Runs scenarios in one start of the ranks; one by one if that fails."""
        try:
            ranks = run_ranks(
                _run_all, layout.world_size, scenarios, layout, timeout=timeout, **options
            )
        except RankFailure as failure:
            if len(scenarios) == 1:
                return cls({scenarios[0].__name__: str(failure)})
            single = [cls.collect([s], layout, timeout=90, **options) for s in scenarios]
            return cls({name: value for one in single for name, value in one.of.items()})
        return cls({name: [result[name] for result in ranks] for name in ranks[0]})

    def ranks(self, scenario: Scenario) -> list[Any]:
        """Returns the result of each rank; fails with the error if there is one."""
        found = self.of[scenario.__name__]
        if isinstance(found, str):
            raise AssertionError(found)
        return found

    def assert_like_one_device(self, scenario: Scenario, **tolerance: Any) -> None:
        """Fails unless every rank has the result of plain Lightning in this process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = scenario(Bench())
        for rank, found in enumerate(self.ranks(scenario)):
            assert_close(found, expected, f"rank {rank}", **tolerance)


def _run_all(
    rank: int, world_size: int, scenarios: Sequence[Scenario], layout: Layout
) -> dict[str, Any]:
    assert world_size == layout.world_size
    warnings.simplefilter("ignore")
    results = {}
    for scenario in scenarios:
        try:
            results[scenario.__name__] = scenario(Bench(layout, rank))
        except BaseException as error:
            text = f"scenario {scenario.__name__} on rank {rank}:\n{traceback.format_exc()}"
            raise RuntimeError(text) from error
    return results


def assert_close(
    found: Any, expected: Any, where: str = "", *, rtol: float = 1e-5, atol: float = 1e-7
) -> None:
    """Fails, with the place, unless two nested results are equal up to rounding of floats."""
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where}: {list(found)} for {list(expected)}"
        for key in expected:
            assert_close(found[key], expected[key], f"{where}[{key!r}]", rtol=rtol, atol=atol)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {found} for {expected}"
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{where}[{index}]", rtol=rtol, atol=atol)
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{where}: {found!r} is no tensor"
        assert found.dtype == expected.dtype, f"{where}: {found.dtype} for {expected.dtype}"
        torch.testing.assert_close(
            found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, float):
        same = math.isclose(found, expected, rel_tol=rtol, abs_tol=atol)
        assert same or (math.isnan(found) and math.isnan(expected)), (
            f"{where}: {found!r} for {expected!r}"
        )
    else:
        assert found == expected, f"{where}: {found!r} for {expected!r}"


def points(count: int = 16, seed: int = 0) -> TensorDataset:
    """Returns samples (features [FEATURES], class)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, _CLASSES, (count,), generator=generator))


def loader(count: int = 16, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Returns a loader of points in order."""
    return DataLoader(points(count), batch_size=batch_size, **options)


def weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Returns the whole state dict, on every rank. Collective over the world."""
    state = trainer.strategy.lightning_module_state_dict()
    state = {name: value.detach().clone() for name, value in state.items()}
    return trainer.strategy.broadcast(state)


class Model(pl.LightningModule):
    """A small classifier with the same initial weights at every construction."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

class ManualWithCritic(Model):
    """For manual optimization: a second small part, and an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.fill_(0.1)

    def both_optimizers(self) -> list[torch.optim.Optimizer]:
        """That of the model, and that of the critic."""
        body = [*self.first.parameters(), *self.second.parameters(), *self.head.parameters()]
        return [
            torch.optim.SGD(body, lr=0.1, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.05),
        ]


class Twice(torch.optim.SGD):
    """Runs the closure at two places, and steps with the second gradients.

    Args:
        parameters: to step.
        lr: of the step.
        ascent: by how much of the first gradients the second place is away.
    """

    def __init__(self, parameters: Any, lr: float, *, ascent: float) -> None:
        super().__init__(parameters, lr=lr)
        self.ascent = ascent

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        moved = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        changes = [self.ascent * p.grad for p in moved]
        with torch.no_grad():
            for parameter, change in zip(moved, changes, strict=True):
                parameter.add_(change)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, change in zip(moved, changes, strict=True):
                parameter.sub_(change)
        super().step()
        return loss



class GradientWatcher(Model):
    """Records the gradients there are, where a hook says so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []

    def look(self) -> None:
        """Records the gradients there are."""
        named = self.named_parameters()
        self.seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})
