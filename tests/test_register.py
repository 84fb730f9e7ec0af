"""The name "smp" reaches every Trainer: by import, by entry point, by class path.

The strategy is a stand-in: these tests are about the way to the class, not about the class. What
happens at import is tested in fresh interpreters, with torch's own autoload off, so that an
installed copy's entry point cannot be what works.
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_smp
from lightning_smp import autoload, register
from tests.support import standin

_ROOT = Path(__file__).parents[1]


def _python(code: str, *, path: Path = _ROOT, **environ: str) -> str:
    """Runs code in a new interpreter with `path` importable; returns its stdout."""
    defaults = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**os.environ, **defaults, **environ},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Builds the classes from the stand-in during one test."""
    monkeypatch.setitem(sys.modules, "lightning_smp.lightning.strategy", standin)
    vars(lightning_smp).pop("SMPStrategy", None)
    register._build.cache_clear()
    yield
    vars(lightning_smp).pop("SMPStrategy", None)
    register._build.cache_clear()


def test_import_loads_neither_torch_nor_lightning() -> None:
    code = "import lightning_smp, sys; print({'torch', 'lightning'} & set(sys.modules))"
    assert _python(code) == "set()\n"


def test_registers_when_lightning_is_imported_later() -> None:
    code = """
import lightning_smp_autoload
lightning_smp_autoload.arm()
import lightning.pytorch.strategies as one, pytorch_lightning.strategies as two
print("smp" in one.StrategyRegistry, "smp" in two.StrategyRegistry)
print(type(one.__loader__).__name__, "exec_module" in vars(one.__loader__))
"""
    assert _python(code) == "True True\nSourceFileLoader False\n"


@pytest.mark.parametrize("namespace", autoload.NAMESPACES)
def test_registers_when_lightning_is_imported_already(namespace: str) -> None:
    registry = importlib.import_module(f"{namespace}.strategies").StrategyRegistry
    del registry["smp"]
    autoload.arm()
    assert "smp" in registry


@pytest.mark.parametrize(("value", "armed"), [("1", True), ("0", False)])
def test_entry_point_can_be_switched_off(value: str, armed: bool) -> None:
    code = """
import lightning_smp_autoload, sys
lightning_smp_autoload.arm()
print("lightning_smp" in sys.modules)
"""
    assert _python(code, LIGHTNING_SMP_AUTOLOAD=value) == f"{armed}\n"


def test_entry_point_survives_a_broken_package(tmp_path: Path) -> None:
    (tmp_path / "lightning_smp").mkdir()
    (tmp_path / "lightning_smp" / "__init__.py").write_text("raise OSError('broken')")
    source = _ROOT / "lightning_smp_autoload.py"
    (tmp_path / source.name).write_text(source.read_text())
    code = "import lightning_smp_autoload; print(lightning_smp_autoload.no_callbacks())"
    assert _python(code, path=tmp_path) == "[]\n"


def test_entry_points_of_the_project_exist() -> None:
    lines = (_ROOT / "pyproject.toml").read_text().splitlines()
    targets = [line.split('"')[1] for line in lines if line.startswith("lightning_smp = ")]
    assert len([target for target in targets if ":" in target]) == 3
    for target in targets:
        if ":" in target:
            assert callable(EntryPoint(name="lightning_smp", value=target, group="any").load())


def test_arming_twice_changes_nothing() -> None:
    before = list(sys.meta_path)
    autoload.arm()
    assert sys.meta_path == before


def test_a_name_taken_by_others_is_left_alone() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    ours = StrategyRegistry["smp"]
    StrategyRegistry["smp"] = theirs = {"strategy": object, "init_params": {}}
    autoload.arm()
    assert StrategyRegistry["smp"] is theirs
    StrategyRegistry["smp"] = ours


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("namespace", "home"),
    [
        ("lightning.pytorch", "lightning_smp"),
        ("pytorch_lightning", "lightning_smp.pytorch_lightning"),
    ],
)
def test_trainer_takes_its_own_class(namespace: str, home: str) -> None:
    pl: ModuleType = importlib.import_module(namespace)
    trainer = pl.Trainer(strategy="smp", accelerator="cpu", logger=False, barebones=True)
    cls = type(trainer.strategy)
    assert issubclass(cls, pl.strategies.Strategy)
    assert (cls.__module__, cls.__qualname__) == (home, "SMPStrategy")
    assert cls is register.strategy_class(namespace)
    assert pickle.loads(pickle.dumps(cls)) is cls


def _strategy_of_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    monkeypatch.setattr(sys, "argv", ["program"])
    args = ["--trainer.accelerator=cpu", "--trainer.barebones=true", *arguments]
    return LightningCLI(
        BoringModel, run=False, seed_everything_default=False, args=args
    ).trainer.strategy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("stand_in")
def test_class_path_in_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = _strategy_of_cli(
        monkeypatch,
        "--trainer.strategy=lightning_smp.SMPStrategy",
        "--trainer.strategy.pipeline_parallel_degree=2",
    )
    assert type(strategy) is lightning_smp.SMPStrategy
    assert vars(strategy)["pipeline_parallel_degree"] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_class_in_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = _strategy_of_cli(
        monkeypatch,
        "--trainer.devices=2",
        "--trainer.strategy=lightning_smp.SMPStrategy",
        "--trainer.strategy.pipeline_parallel_degree=2",
    )
    assert type(strategy) is lightning_smp.SMPStrategy
    assert strategy.config.pipeline_parallel_degree == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("stand_in")
def test_class_path_in_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("""
trainer:
  strategy:
    class_path: lightning_smp.SMPStrategy
    init_args: {pipeline_parallel_degree: 4, pipeline: simple}
""")
    strategy = _strategy_of_cli(monkeypatch, "--config", str(config))
    assert type(strategy) is lightning_smp.SMPStrategy
    assert vars(strategy)["pipeline"] == "simple"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("stand_in")
def test_name_in_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        type(_strategy_of_cli(monkeypatch, "--trainer.strategy=smp")) is lightning_smp.SMPStrategy
    )


@pytest.mark.usefixtures("stand_in")
def test_class_of_the_other_namespace_gives_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("pytorch_lightning")
    lightning_smp.strategy_class("lightning.pytorch")  # built, so it is not imported again below
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    with pytest.warns(UserWarning, match="from lightning_smp.pytorch_lightning import") as caught:
        lightning_smp.SMPStrategy  # noqa: B018 - the look-up is what is tested
    assert caught[0].filename == __file__


def test_unknown_namespace_is_refused() -> None:
    with pytest.raises(lightning_smp.ConfigError, match=r"'torch_lightning'.*pass one of"):
        lightning_smp.strategy_class("torch_lightning")


def test_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SMPStratgy'"):
        lightning_smp.SMPStratgy  # noqa: B018 - the look-up is what is tested
