"""A stand-in for the strategy, which shows the class a Trainer got and its arguments."""

from types import ModuleType
from typing import Any

import torch

__all__ = ["make_strategy_class"]


def make_strategy_class(pl: ModuleType) -> type:
    """Has the interface of `lightning_smp.lightning.strategy.make_strategy_class`."""

    class StandIn(pl.strategies.SingleDeviceStrategy):  # type: ignore[name-defined, misc]
        def __init__(self, pipeline_parallel_degree: int = 1, pipeline: str = "interleaved"):
            super().__init__(device=torch.device("cpu"))
            self.pipeline_parallel_degree = pipeline_parallel_degree
            self.pipeline = pipeline

        @classmethod
        def register_strategies(cls, registry: Any) -> None:
            raise AssertionError("Lightning calls this for its own classes only")

    return StandIn
