"""The plan: memory and time of layouts, the search, and the command around them."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smp.commands.plan import main
from lightning_smp.errors import ConfigError
from lightning_smp.partitioning import analyze, fake_batch, find_atoms, new_fake_mode
from lightning_smp.planning import (
    DEVICES,
    Estimator,
    Layout,
    Profile,
    Setup,
    class_source,
    hugging_face_source,
    search,
)

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 256,
        "tie_word_embeddings": False}  # fmt: skip
LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
             "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
             "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip


class Layers(nn.Module):
    """Equal layers, so that every number can be worked out by hand."""

    def __init__(self, count: int = 8, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FREE = replace(DEVICES["h100"], link=1e18, network=1e18)
"""Transfers take no time: the textbook's assumption."""


def estimator(count: int = 8, **options: Any) -> Estimator:
    root = Layers(count)
    atoms = find_atoms(root)
    mode = new_fake_mode()
    batch = fake_batch(torch.zeros(1, 32), mode)
    analysis = analyze(root, lambda copy: copy(batch).sum(), atoms, mode=mode)
    assert analysis.reason is None
    given = {"world_size": 8, "memory": 2.0**30, "device": DEVICES["h100"], "batch_size": 32}
    setup = Setup(**{**given, **options})
    profile = Profile({1: analysis}, setup.device.model())
    return Estimator(root, atoms, profile, setup)


def layout(pp: int = 1, tp: int = 1, dp: int = 1, virtual: int = 1, count: int = 8) -> Layout:
    return Layout(pp, tp, dp, virtual, count, 1, recompute=False)


def test_state_is_counted_exactly() -> None:
    weight, bias = 8 * 32 * 32 * 4, 8 * 32 * 4
    (one,) = estimator().simulated(layout()).memory
    assert one.parameters == one.gradients == weight + bias
    assert one.optimizer == 2 * (weight + bias)
    (split,) = estimator(optimizer_states=0).simulated(layout(tp=2)).memory
    assert split.parameters == weight / 2 + bias
    assert split.optimizer == 0
    stages = estimator().simulated(layout(pp=4)).memory
    assert sum(stage.parameters for stage in stages) == weight + bias


def test_activations_are_those_of_the_schedule() -> None:
    """1F1B keeps pp microbatches on the first stage and one on the last."""
    (whole,) = estimator(32, device=FREE).simulated(layout(count=1)).memory
    per_stage = whole.activations / 4
    assert per_stage > 0
    stages = estimator(32, device=FREE).simulated(layout(pp=4)).memory
    assert [s.activations / per_stage for s in stages] == pytest.approx([4, 3, 2, 1], rel=0.15)
    simple = estimator(32, device=FREE, pipeline="simple").simulated(layout(pp=4)).memory
    assert simple[3].activations == pytest.approx(8 * stages[3].activations)


def test_bubble_meets_the_formula() -> None:
    free = estimator(32, device=FREE)
    for pp, virtual in ((2, 1), (4, 1), (2, 2), (4, 2)):
        exact = free.simulated(layout(pp=pp, virtual=virtual))
        ideal = (pp - 1) / virtual / (8 + (pp - 1) / virtual)
        assert exact.bubble == pytest.approx(ideal, abs=0.03), (pp, virtual)
        rough = free.approximate(layout(pp=pp, virtual=virtual))
        assert rough.step_s == pytest.approx(exact.step_s, rel=0.1), (pp, virtual)
        assert rough.peak == pytest.approx(exact.peak, rel=0.1), (pp, virtual)


def test_further_microbatches_repeat_the_steady_state() -> None:
    few, many = (estimator().simulated(layout(pp=2, count=n)) for n in (100, 200))
    assert many.step_s == pytest.approx(2 * few.step_s, rel=0.05)
    assert many.timeline is not None
    assert sum(a.action.kind == "F" for a in many.timeline.ranks[0]) == 6


def test_search_gives_layouts_of_the_world_fastest_first() -> None:
    found = search(estimator(), fixed={})
    times = [one.step_s for one in found.best]
    assert times == sorted(times)
    for one in found.best:
        here = one.layout
        assert here.pp * here.tp * here.dp == 8
        assert here.dp * here.microbatches * here.microbatch_size == 32
        assert one.peak <= 2.0**30
    fixed = search(estimator(), fixed={"pp": 4, "virtual": 2, "tp": 1, "recompute": False})
    assert {(o.layout.pp, o.layout.virtual, o.layout.tp) for o in fixed.best} == {(4, 2, 1)}
    with pytest.raises(ConfigError, match="No layout of 8 ranks with pp=3"):
        search(estimator(), fixed={"pp": 3})


def test_more_stages_where_memory_is_short() -> None:
    whole = estimator().simulated(layout(dp=8, count=1)).peak
    found = search(estimator(memory=whole * 0.6), fixed={"tp": 1})
    assert found.best
    assert all(one.layout.pp > 1 for one in found.best)


def test_tensor_degree_divides_the_heads() -> None:
    found = search(estimator(), fixed={"pp": 1}, max_tensor_degree=2)
    assert {one.layout.tp for one in found.best} <= {1, 2}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    return str(path)


def test_command_prints_a_plan(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [config, "--world-size", "8", "--memory", "4", "--sequence-length", "64"]
    assert main([*arguments, "--pp", "4", "--virtual", "2", "--tp", "1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "GPT2LMHeadModel of", "8 ranks with 2.00 GiB each", "Best of", "Partition assignments:",
        "Peak memory of a rank, by stage:", "Schedule", "rank 3  |", "tokens/s",
        "virtual_pipeline_degree=2",
    ):  # fmt: skip
        assert part in text
    assert text.count("h.") >= 8


def test_command_says_why_nothing_fits(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [config, "--world-size", "2", "--reserve", "0", "--sequence-length", "64"]
    assert main([*arguments, "--memory", "0.0001"]) == 1
    text = capsys.readouterr().out
    assert "Does not fit because every one of the" in text
    assert "The smallest is pp=" in text
    assert "alone are" in text
    assert main([*arguments, "--memory", "0.0044", "--batch-size", "2", "--tp", "1"]) == 1
    assert "Without activations and buffers it would fit" in capsys.readouterr().out


def test_command_knows_model_types(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--set",
        "n_layer=2",
        "--set",
        "n_head=4",
        "--set",
        "n_embd=64",
        "--sequence-length",
        "32",
    ]
    assert main(["gpt2", "--world-size", "2", *small]) == 0
    assert "GPT2LMHeadModel of gpt2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama"], "neither a file nor a model type"),
        (["gpt2", "--set", "n_layers=2"], "has no 'n_layers'"),
        (["torch.nn:Linear"], "needs to know a batch"),
        (["torch.nn:Nothing", "--input", "float32:3"], "cannot be imported"),
        (["torch.nn:Linear", "--input", "float32:3"], "cannot be made: TypeError"),
        (["torch.nn:Linear", "--input", "3"], "must read [name=]type:sizes"),
        (["gpt2", "--pp", "7"], "No layout of 2 ranks"),
        (["gpt2", "--set", "n_layer=two"], "no valid 'gpt2' configuration"),
        (["gpt2", "--set", "n_embd=10", "--set", "n_head=3"], "cannot make a causal language"),
        (["t5"], "planned as a class: file.py:Class"),
        (["gpt2", "--memory", "1.5"], "Of 1.5 GiB on a GPU, --reserve 2 leaves nothing"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--world-size", "2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--memory", "nan"], ["--efficiency", "0"], ["--bandwidth=-1"], ["--link=inf"]]
)
def test_impossible_machines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["gpt2", "--world-size", "2", *arguments])
    assert end.value.code == 2
    assert f"argument {arguments[0].partition('=')[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"model_type": ["gpt2"]}', "neither a file nor a model type"),
        ("config.json", '{"model_type": "gpt2", "n_embd": "x"}', "no valid 'gpt2' configuration"),
        ("broken.py", "class Net(:", "cannot be imported: SyntaxError"),
        ("raising.py", "raise ValueError('mine')", "cannot be imported: ValueError: mine"),
    ],
)
def test_bad_files(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    model = f"{path}:Net" if name.endswith(".py") else str(path)
    assert main([model, "--world-size", "2", "--input", "float32:3"]) == 2
    assert message in capsys.readouterr().err


ODD = """
import torch
from torch import nn

class Rates(nn.Module):
    "Asks for numbers while it is made."
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 4)]
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in self.rates])

    def forward(self, x):
        for rate, layer in zip(self.rates, self.layers):
            x = x + rate * layer(x)
        return x.sum()

class Nothing(nn.Module):
    def forward(self, x):
        return x

class Asks(Rates):
    def forward(self, x):
        y = super().forward(x)
        return y if y.item() > 0 else -y
"""


@pytest.mark.parametrize(
    ("name", "expected", "rate"),
    [
        ("Rates", "layers.0", r"\d"),
        ("Nothing", "One stage", "inf"),
        ("Asks", "Neither times", r"\?"),
    ],
)
def test_odd_classes(
    name: str, expected: str, rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    assert main([f"{path}:{name}", "--input", "float32:8", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert expected in text
    best = text.split("samples/s\n")[1].splitlines()[0]
    assert re.search(rf"{rate}$", best), best


MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn

class Net(pl.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(depth)])

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss
"""


def test_lightning_module_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mymodule.py"
    path.write_text(MODULE)
    arguments = [f"{path}:Net", "--set", "depth=6", "--input", "x=float32:16"]
    arguments += ["--input", "y=float32:16", "--world-size", "2", "--pp", "2", "--virtual", "1"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "could not be analysed" not in text
    assert "net.0-2" in text
    assert "net.3-5" in text
    assert "samples/s" in text


def test_sources_hold_no_memory() -> None:
    source = hugging_face_source("gpt2", sequence_length=8, precision="bf16-true", overrides={})
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in source.root.parameters())
    made = class_source(
        "torch.nn:Linear", inputs=["float32:3"], precision="32-true",
        arguments={"in_features": 3, "out_features": 2},
    )  # fmt: skip
    assert all(p.is_meta for p in made.root.parameters())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_70_billion_parameters_on_512_ranks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    command = [sys.executable, "-m", "lightning_smp", "plan", str(path), "--world-size", "512"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "70,553,706,496 parameters" in done.stdout
    assert after.ru_utime - before.ru_utime < 120, "seconds of processor time"
    assert after.ru_maxrss < 4 * 2**20, "KiB"
