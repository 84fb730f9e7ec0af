"""Where values come from, which one wins, and what is said about bad sources."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_smp.config import KEYS, UNSET, SMPConfig, resolve_config
from lightning_smp.config.kinds import Choice, Flag, NameStyles, Number, Text, Whole
from lightning_smp.errors import ConfigError


def _refusal(*sources: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(*sources, **{"environ": {}, **named})
    return str(caught.value)


def test_no_source_gives_the_defaults() -> None:
    assert resolve_config(environ={}) == SMPConfig()


def test_later_source_wins_key_by_key() -> None:
    environ = {"SMP_CONFIG": '{"microbatches": 2, "pipeline": "simple", "timeout": 5}'}
    config = {"microbatches": 3, "timeout": 6}
    result = resolve_config(config, {"microbatches": 4}, environ)
    assert (result.microbatches, result.timeout, result.pipeline) == (4, 6.0, "simple")


def test_alias_of_an_earlier_source_is_overridden() -> None:
    environ = {"SM_HP_MP_PARAMETERS": '{"partitions": 2}'}
    assert resolve_config(None, None, environ).pipeline_parallel_degree == 2
    assert resolve_config({"pipeline_parallel_degree": 4}, None, environ).partitions == 4
    assert resolve_config(None, {"partitions": 8}, environ).partitions == 8


def test_own_variable_hides_the_launchers() -> None:
    environ = {"SMP_CONFIG": '{"microbatches": 2}', "SM_HP_MP_PARAMETERS": '{"partitions": 2}'}
    result = resolve_config(environ=environ)
    assert (result.microbatches, result.partitions) == (2, 1)
    environ["SMP_CONFIG"] = ""
    assert resolve_config(environ=environ).partitions == 2


def test_published_launcher_value_is_accepted() -> None:
    text = '{"ddp":true,"microbatches":4,"partitions":2,"pipeline":"interleaved"}'
    result = resolve_config(environ={"SM_HP_MP_PARAMETERS": text})
    assert result == SMPConfig(ddp=True, microbatches=4, pipeline_parallel_degree=2)


def test_variable_may_name_a_file(tmp_path: Path) -> None:
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({"microbatches": 7}))
    assert resolve_config(environ={"SMP_CONFIG": str(path)}).microbatches == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "met a list"),
        ("no/such/file.json", "No such file"),
        ('{"timeout": NaN}', "NaN is not JSON"),
        ('{"microbatches": 1, "microbatches": 2}', "'microbatches' is there twice"),
        ("{" * 100_000, ""),
        ('{"a":' * 100_000, "recursion"),
        ("a\0b", "null"),
    ],
    ids=lambda text: text[:20].replace("\0", "0"),
)
def test_bad_variable_is_named_with_the_reason(text: str, reason: str) -> None:
    message = _refusal(environ={"SMP_CONFIG": text})
    assert "- SMP_CONFIG = " in message
    assert "it must be a JSON object or the path of a file with one" in message
    assert reason in message


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "smp.json"
    path.write_bytes(b"\xff\xfe")
    assert "can't decode" in _refusal(environ={"SMP_CONFIG": str(path)})
    assert "Is a directory" in _refusal(environ={"SMP_CONFIG": str(tmp_path)})


def test_unset_and_none_arguments_do_not_override() -> None:
    arguments = {"microbatches": None, "pipeline": UNSET, "timeout": 9}
    result = resolve_config({"microbatches": 4, "pipeline": "simple"}, arguments, {})
    assert (result.microbatches, result.pipeline, result.timeout) == (4, "simple", 9.0)


def test_config_object_counts_where_it_differs_from_the_defaults() -> None:
    environ = {"SMP_CONFIG": '{"partitions": 2, "microbatches": 2}'}
    result = resolve_config(SMPConfig(microbatches=8), None, environ)
    assert (result.partitions, result.microbatches) == (2, 8)


@pytest.mark.parametrize("config", ["file.json", 3, [("microbatches", 2)]])
def test_config_of_another_type_is_refused(config: Any) -> None:
    assert "config = " in _refusal(config)
    assert "it must be a dict or an SMPConfig" in _refusal(config)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("micro_batches", "microbatches"),
        ("partition", "partitions"),
        ("Pipeline", "pipeline"),
        ("tensor_parallel", "tensor_parallel_degree"),
        ("placement", "placement_strategy"),
    ],
)
def test_unknown_key_gets_the_nearest(name: str, near: str) -> None:
    text = _refusal({name: 1})
    assert (
        f"{name} = 1 (from the config argument): there is no such key. Did you mean {near}?" in text
    )


def test_unknown_key_without_a_neighbour() -> None:
    assert "zzz = 1 (from the arguments): there is no such key. Remove it" in _refusal(
        None, {"zzz": 1}
    )
    assert "3 = 1 (from the config argument): there is no such key" in _refusal({3: 1})


def test_two_names_of_one_key_must_agree() -> None:
    agreed = {"partitions": 2, "pipeline_parallel_degree": 2}
    assert resolve_config(agreed, None, {}).partitions == 2
    text = _refusal({"partitions": 2, "pipeline_parallel_degree": 4})
    assert "pipeline_parallel_degree = 4 (from the config argument)" in text
    assert "another name of partitions, which is 2. Remove pipeline_parallel_degree." in text


def test_problems_of_all_sources_are_reported_together_with_their_source() -> None:
    text = _refusal(
        {"microbatches": 0, "nonsense": 1},
        {"timeout": -1},
        environ={"SMP_CONFIG": '{"pipeline": "x", "horovod": true}'},
    )
    assert "5 problems" in text
    assert "microbatches = 0 (from the config argument)" in text
    assert "timeout = -1 (from the arguments)" in text
    assert "pipeline = 'x' (from the environment variable SMP_CONFIG)" in text
    assert "horovod = True (from the environment variable SMP_CONFIG)" in text


def test_rule_between_keys_names_the_source() -> None:
    text = _refusal({"partitions": 2}, {"default_partition": 5})
    assert "default_partition = 5 (from the arguments): it must be below" in text


def test_bad_value_that_is_overridden_does_not_count() -> None:
    assert resolve_config({"microbatches": 0}, {"microbatches": 2}, {}).microbatches == 2


def test_undocumented_keys_are_accepted_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_smp"):
        config = resolve_config({"static_mode": True, "_match_weights": True}, None, {})
    assert config.static_mode
    assert [record.args[0] for record in caplog.records] == ["static_mode", "_match_weights"]  # type: ignore[index]


class Broken:
    """A value that resists being looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 2**40, 10**5000, -(10**5000),
    0.0, 0.5, 2.0, -1.5, math.nan, math.inf, "", "2", "true", "simpel", "x" * 200, "\ud800", b"x",
    [], [1], {}, {"a": 1}, (1,), UNSET, object(), Broken(), torch.ones(2), np.ones(2),
]  # fmt: skip
NAMES = [*KEYS, "partitions"]


def _random_config(random: Random) -> dict[Any, Any]:
    """Return up to five keys, most of them with a value that is valid by itself."""
    config: dict[Any, Any] = {}
    for _ in range(random.randint(0, 5)):
        name = random.choice(NAMES)
        config[name] = random.choice(ODD) if random.random() < 0.2 else _likely(name, random)
    if random.random() < 0.1:
        config[random.choice(["microbatch", "", "zz", 3, None, 1.5])] = random.choice(ODD)
    return config


def _likely(name: str, random: Random) -> object:
    kind = KEYS["pipeline_parallel_degree" if name == "partitions" else name].kind
    if isinstance(kind, Choice):
        return random.choice(kind.words)
    values: dict[type[Any], list[Any]] = {
        Flag: [True, False],
        Whole: [1, 2, 3, 4],
        Number: [0.25, 1, 1.0],
        Text: ["a"],
        NameStyles: ["auto", {"*.fc1": "column"}],
    }
    return random.choice(values[type(kind)])


def test_ten_thousand_random_configs_are_valid_or_a_config_error() -> None:
    random = Random(7)
    outcomes = Counter(_outcome(random) for _ in range(10_000))
    # All three must be exercised, or the generator is of no use.
    assert min(outcomes[kind] for kind in ("valid", "refused", "refused by the world")) > 300


def _outcome(random: Random) -> str:
    try:
        result = resolve_config(_random_config(random), _random_config(random), {})
    except ConfigError as error:
        return _checked(error, "refused")
    assert SMPConfig(**result.as_dict()) == result
    assert len(result.fingerprint()) == 64
    world_size = random.choice([1, 2, 3, 4, 8, 12, 0, -1])
    try:
        topology = result.topology(world_size)
    except ConfigError as error:
        return _checked(error, "refused by the world")
    assert topology.size == world_size
    return "valid"


def _checked(error: ConfigError, outcome: str) -> str:
    assert str(error).startswith("Invalid SMP configuration, ")
    return outcome


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_random_variables_are_valid_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        resolve_config(environ={"SMP_CONFIG": text})
