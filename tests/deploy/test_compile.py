"""Compiled units: the same numbers, the same draws, and by name what cannot be compiled."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smp import ConfigError, SMPStrategy
from lightning_smp.placed.compiling import UnitCompiler
from tests.support.launch import run_ranks

_WIDTH, _LAYERS = 6, 10


class Layer(nn.Module):
    """More of them than torch compiles one function for, since each has a number of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.2)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x))) / (self.number + 1)


class Branching(nn.Module):
    """Asks a tensor for its value, so it cannot be compiled whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x * self.scale, 0.1)
        return y if y.sum() > 0 else -y


class Model(pl.LightningModule):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(map(Layer, range(num_layers)))
        self.branch = Branching()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return (self.branch(x) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _fit(devices: int, num_layers: int = _LAYERS, **smp: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    pl.seed_everything(7, verbose=False)
    model, notes = Model(num_layers), _Notes()
    logging.getLogger("lightning_smp.placed.compiling").addHandler(notes)
    strategy = SMPStrategy(pipeline_parallel_degree=devices, microbatches=2, **smp)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    x = torch.randn(2, 12, _WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.fit(model, DataLoader(TensorDataset(*x), batch_size=4))
    logging.getLogger("lightning_smp.placed.compiling").removeHandler(notes)
    deployment = strategy.deployment
    units = [] if deployment.runtime is None else deployment.runtime.units
    compiled = [u.name for u in units if getattr(u._forward, "is_compiled", False)]
    weights = strategy.lightning_module_state_dict()
    return {
        "losses": model.losses,
        "weights": {name: value.clone() for name, value in weights.items()},
        "compiled": compiled,
        "local": [u.name for u in units if u.stage == deployment.groups.pp_rank],
        "notes": notes.texts,
    }


def _two_stages(rank: int, world_size: int) -> list[dict[str, Any]]:
    chunks = {"virtual_pipeline_degree": 2}
    return [
        _fit(2),
        _fit(2, compile=True, config={"compile_backend": "aot_eager"}),
        _fit(2, **chunks, compile=True, config={"compile_backend": "eager"}),
    ]


def _one_stage(rank: int, world_size: int) -> dict[str, Any]:
    return _fit(1, compile=True, config={"compile_backend": "eager"})


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-11)
    assert expected["weights"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(200)
def test_compiled_units_train_as_before() -> None:
    ranks = run_ranks(_two_stages, 2, timeout=180)
    (one,) = run_ranks(_one_stage, 1)
    plain = ranks[0][0]
    for number in (1, 2):
        _assert_equal(ranks[0][number], plain)
        found = [rank[number] for rank in ranks]
        for run in found:
            assert run["compiled"] == [name for name in run["local"] if name != "branch"]
        assert len([*found[0]["compiled"], *found[1]["compiled"]]) == _LAYERS
        (note,) = [note for run in found for note in run["notes"]]
        assert "unit 'branch' is not compiled" in note
        assert "ata-dependent" in note
    _assert_equal(one, plain)
    assert len(one["notes"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_inductor() -> None:
    """Its dropout draws are its own, but the same for every number of stages."""
    ranks = run_ranks(_inductor, 2, timeout=380)
    (one,) = run_ranks(_inductor, 1, timeout=380)
    _assert_equal(ranks[0], one)


def _inductor(rank: int, world_size: int) -> dict[str, Any]:
    return _fit(world_size, 2, compile=True)


def test_backends_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"compile_backend.*it needs compile=True"):
        SMPStrategy(config={"compile_backend": "eager"})
    with pytest.raises(ConfigError, match=r"compile_backend = 'nope'.*inductor"):
        UnitCompiler("nope")
