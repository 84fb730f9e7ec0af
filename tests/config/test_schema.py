"""Every key and every rule of the configuration, and the surface that must not change unseen."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_smp.config import KEYS, SMPConfig
from lightning_smp.config.keys import Key, Support
from lightning_smp.config.kinds import Choice, Flag, NameStyles, Number, Whole
from lightning_smp.errors import ConfigError
from lightning_smp.topology import Topology

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "configuration.md"
# What a value other than the default needs.
COMPANIONS: dict[str, dict[str, object]] = {
    "auto_partition": {"default_partition": 0},
    "virtual_pipeline_degree": {"pipeline_parallel_degree": 2},
    "schedule_file": {"pipeline": "file"},
    "timeline_every_n_steps": {"pipeline_parallel_degree": 2},
    "rebalance_after_steps": {"pipeline_parallel_degree": 2},
    "compile_backend": {"compile": True},
}
PLANNED = [name for name, key in KEYS.items() if key.support is Support.PLANNED]


def _other(key: Key) -> object:
    """Return a value of the right kind that is not the default."""
    if isinstance(key.kind, Flag):
        return not key.default
    if isinstance(key.kind, Whole):
        return 2 if key.default != 2 else 3
    return 0.5 if isinstance(key.kind, Number) else "x"


def _refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SMPConfig(**values)
    return str(caught.value)


def test_keys_are_those_of_the_golden_list() -> None:
    lines = [f"{name}: {key.rule} = {key.default!r}" for name, key in KEYS.items()]
    assert lines == (HERE / "golden_keys.txt").read_text().splitlines()


def test_document_has_exactly_the_rows_of_the_keys() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert rows == [_row(key) for key in KEYS.values()]


def _row(key: Key) -> str:
    names = ", ".join(f"`{name}`" for name in (key.name, *key.aliases))
    return f"| {names} | {key.rule} | `{key.default!r}` | {key.support.value} | {key.about} |"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_default_obeys_its_own_rule(key: Key) -> None:
    assert key.accepts(key.default)
    assert list(key.problems(key.default)) == []


def test_defaults_are_valid_and_frozen() -> None:
    config = SMPConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.microbatches = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SMPConfig(2)  # type: ignore[misc]


INTS = [name for name, key in KEYS.items() if isinstance(key.kind, Whole)]
FLAGS = [name for name, key in KEYS.items() if isinstance(key.kind, Flag)]
NUMBERS = [name for name, key in KEYS.items() if isinstance(key.kind, Number)]
CHOICES = [name for name, key in KEYS.items() if isinstance(key.kind, Choice)]


@pytest.mark.parametrize("name", INTS)
def test_int_keys_refuse_anything_else(name: str) -> None:
    values: list[object] = [-1, 2.0, "2", True, 2**31, math.nan, [2], 10**5000]
    for value in values:
        text = _refusal(**{name: value})
        assert f"{name} = " in text
        assert "it must be an int >= " in text
        assert f"Use {name}=" in text


@pytest.mark.parametrize("name", FLAGS)
def test_flags_refuse_anything_else(name: str) -> None:
    values: list[object] = [0, 1, "true", 1.0, []]
    for value in values:
        assert f"{name} = {value!r}: it must be True or False" in _refusal(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_number_keys_refuse_anything_else(name: str) -> None:
    values: list[object] = [-1, -0.5, math.nan, math.inf, "1", True, {}]
    for value in values:
        assert f"{name} = {value!r}: it must be a" in _refusal(**{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_refuse_anything_else(name: str) -> None:
    values: list[object] = ["", "nonsense", 1, None]
    for value in values:
        assert f"{name} = {value!r}: it must be one of " in _refusal(**{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_accept_each_word(name: str) -> None:
    kind = KEYS[name].kind
    assert isinstance(kind, Choice)
    for word in kind.words:
        companions = {"schedule_file": "x"} if word == "file" else {}
        assert getattr(SMPConfig(**companions, **{name: word}), name) == word


@pytest.mark.parametrize("name", PLANNED)
def test_planned_key_is_refused_by_name_unless_default(name: str) -> None:
    key = KEYS[name]
    assert getattr(SMPConfig(**{name: key.default}), name) == key.default
    text = _refusal(**{name: _other(key)})
    assert f"{name} = {_other(key)!r}: it is not supported yet and must be {key.default!r}" in text
    assert key.instead in text


@pytest.mark.parametrize("name", [name for name in KEYS if name not in PLANNED])
def test_other_keys_accept_some_other_value(name: str) -> None:
    key = KEYS[name]
    if isinstance(key.kind, Choice):
        return
    value = 0 if name == "default_partition" else _other(key)
    if isinstance(key.kind, NameStyles):
        value = {"*.fc1": "column"}
    assert getattr(SMPConfig(**{**COMPANIONS.get(name, {}), name: value}), name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bf16": True}, 'Trainer(precision="bf16-mixed")'),
        ({"microbatches": "8"}, "Use microbatches=8."),
        ({"microbatches": 0}, "Use microbatches=1."),
        ({"pipeline": "Simple"}, "Use pipeline='simple'."),
        ({"pipeline": "_only_forward"}, 'one of "simple", "interleaved"'),
        ({"ddp": "on"}, "Use ddp=True."),
        (
            {"memory_weight": 1.5},
            "it must be a number between 0 and 1 or None. Use memory_weight=1",
        ),
        ({"timeout": 0}, "it must be a finite number > 0. Use timeout=300.0."),
        ({"auto_partition": False}, "Use default_partition=0."),
        (
            {"pipeline_parallel_degree": 2, "default_partition": 2},
            "below pipeline_parallel_degree, which is 2. Use default_partition=1.",
        ),
        (
            {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "auto_partition": False},
            "place modules on the stages in turn",
        ),
        ({"virtual_pipeline_degree": 2}, "it must be 1 because pipeline_parallel_degree is 1"),
        ({"pipeline": "file"}, "schedule_file = None: it must be given"),
        ({"schedule_file": "x"}, 'it needs pipeline="file", but pipeline is "interleaved"'),
        ({"pipeline": "simple", "activation_limit_mb": 1.0}, 'Use pipeline="auto".'),
        ({"ddp": False, "ddp_dist_backend": "nccl"}, "ddp_dist_backend = 'nccl': it needs data"),
        ({"ddp": False, "ddp_port": 1234}, "ddp_port = 1234: it needs data parallelism"),
        ({"ddp": True, "horovod": True}, "horovod = True: it excludes ddp"),
        ({"ddp": False, "tensor_parallel_degree": 2}, "because tensor_parallel_degree > 1"),
        ({"ddp": False, "sharded_data_parallel_degree": 2}, "because sharded_data_parallel_degr"),
        (
            {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2},
            "it must be 1 because pipeline_parallel_degree > 1",
        ),
        (
            {"shard_optimizer_state": True, "sharded_data_parallel_degree": 2},
            "Use shard_optimizer_state=False.",
        ),
        (
            {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2},
            "Use prescaled_batch=True.",
        ),
        ({"fp16": True, "bf16": True}, "bf16 = True: it excludes fp16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusal_says_what_works(values: dict[str, Any], message: str) -> None:
    assert message in _refusal(**values)


def test_all_problems_are_reported_together() -> None:
    text = _refusal(microbatches=0, pipeline="x", timeout=-1, horovod=True, auto_partition=False)
    assert "5 problems" in text
    for name in ("microbatches", "pipeline", "timeout", "horovod", "default_partition"):
        assert f"- {name} = " in text


def test_derived_defaults() -> None:
    assert SMPConfig(pipeline_parallel_degree=4).active_microbatch_limit == 6
    assert SMPConfig(active_microbatches=1).active_microbatch_limit == 1
    virtual = SMPConfig(pipeline_parallel_degree=4, virtual_pipeline_degree=2)
    assert virtual.active_microbatch_limit == 8
    assert SMPConfig().partition_memory_weight == 0.8
    assert SMPConfig(optimize="speed").partition_memory_weight == 0.2
    assert SMPConfig(memory_weight=0).partition_memory_weight == 0
    assert SMPConfig(pipeline_parallel_degree=3).partitions == 3


def test_dict_is_json_and_makes_an_equal_config() -> None:
    config = SMPConfig(pipeline_parallel_degree=2, microbatches=8, timeout=60, memory_weight=1)
    values = json.loads(json.dumps(config.as_dict()))
    assert SMPConfig(**values) == config


def test_fingerprint_depends_on_values_only() -> None:
    assert SMPConfig(timeout=300).fingerprint() == SMPConfig().fingerprint()
    prints = {SMPConfig(microbatches=n).fingerprint() for n in range(1, 20)}
    assert len(prints) == 19
    assert all(len(text) == 64 for text in prints)


def test_topology_of_a_world() -> None:
    config = SMPConfig(pipeline_parallel_degree=2, placement_strategy="spread")
    assert config.topology(8) == Topology(2, 1, 4, "spread")


@pytest.mark.parametrize(
    ("degree", "world_size", "message"),
    [
        (3, 8, "it must divide the world size 8. Use 2 or 4, or start a multiple of 3 ranks."),
        (16, 8, "Use 8, or start a multiple of 16 ranks."),
        (1, 0, "world size = 0: it must be an int >= 1"),
        (1, "8", "world size = '8': it must be an int >= 1"),
    ],
)
def test_world_that_does_not_fit(degree: int, world_size: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SMPConfig(pipeline_parallel_degree=degree).validate_world(world_size)
    assert message in str(caught.value)


def test_replicas_are_refused_without_ddp() -> None:
    config = SMPConfig(pipeline_parallel_degree=2, ddp=False)
    config.validate_world(2)
    with pytest.raises(ConfigError, match=r"4 ranks make 2 replicas. Use ddp=True"):
        config.validate_world(4)
    SMPConfig(pipeline_parallel_degree=2, ddp=True).validate_world(4)
    SMPConfig(pipeline_parallel_degree=2).validate_world(4)
