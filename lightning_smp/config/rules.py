"""Rules between keys, one small function each, and the rules that need the number of ranks.

A rule gets the values and returns its problem or None. It runs only where each of its keys
holds a value of the right kind, so it need not check that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from lightning_smp.config.keys import Key
from lightning_smp.config.problems import Problem, shown
from lightning_smp.topology import nearest_divisors

__all__ = ["cross_problems", "world_problems"]

Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Rule:
    keys: tuple[str, ...]
    check: Callable[[Values], Problem | None]


def cross_problems(
    values: Mapping[str, object], keys: Mapping[str, Key], origins: Mapping[str, str] | None = None
) -> list[Problem]:
    """Return the broken rules between keys; keys that `values` lacks have their default."""
    full = {name: key.default for name, key in keys.items()} | dict(values)
    valid = {name for name, key in keys.items() if key.accepts(full[name])}
    found = [rule.check(full) for rule in _RULES if valid.issuperset(rule.keys)]
    return [_with_origin(problem, origins or {}) for problem in found if problem is not None]


def world_problems(values: Values, keys: Mapping[str, Key], world_size: int) -> list[Problem]:
    """Return the broken rules that need the number of ranks."""
    if type(world_size) is not int or world_size < 1:
        return [Problem("world size", shown(world_size), "it must be an int >= 1", "Start a rank.")]
    found = (_degrees_divide(values, world_size), _replicas_need_ddp(values, world_size))
    return [problem for problem in found if problem is not None]


def _with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    origin = origins.get(problem.key, "")
    return Problem(problem.key, problem.met, problem.rule, problem.fix, origin)


def _problem(values: Values, name: str, rule: str, fix: str) -> Problem:
    return Problem(name, shown(values[name]), rule, fix)


def _manual_partition_needs_default(values: Values) -> Problem | None:
    if values["auto_partition"] or values["default_partition"] is not None:
        return None
    rule = "it must be given because auto_partition is False"
    return _problem(values, "default_partition", rule, "Use default_partition=0.")


def _default_partition_exists(values: Values) -> Problem | None:
    stages, partition = values["pipeline_parallel_degree"], values["default_partition"]
    if partition is None or partition < stages:
        return None
    rule = f"it must be below pipeline_parallel_degree, which is {stages}"
    return _problem(values, "default_partition", rule, f"Use default_partition={stages - 1}.")


def _virtual_needs_auto_partition(values: Values) -> Problem | None:
    if values["virtual_pipeline_degree"] == 1 or values["auto_partition"]:
        return None
    rule = "it must be 1 because auto_partition is False"
    fix = "Use auto_partition=True, or place modules on the stages in turn."
    return _problem(values, "virtual_pipeline_degree", rule, fix)


def _virtual_needs_stages(values: Values) -> Problem | None:
    if values["virtual_pipeline_degree"] == 1 or values["pipeline_parallel_degree"] > 1:
        return None
    rule = "it must be 1 because pipeline_parallel_degree is 1"
    fix = "Use virtual_pipeline_degree=1, or more stages."
    return _problem(values, "virtual_pipeline_degree", rule, fix)


def _virtual_needs_contiguous(values: Values) -> Problem | None:
    if values["virtual_pipeline_degree"] == 1 or values["partition_policy"] == "contiguous":
        return None
    rule = 'it must be 1 because partition_policy is "tree"'
    return _problem(values, "virtual_pipeline_degree", rule, 'Use partition_policy="contiguous".')


def _timeline_needs_stages(values: Values) -> Problem | None:
    if values["timeline_every_n_steps"] == 0 or values["pipeline_parallel_degree"] > 1:
        return None
    rule = "a single stage has no schedule to measure"
    return _problem(values, "timeline_every_n_steps", rule, "Use timeline_every_n_steps=0.")


def _rebalance_needs_stages(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] == 0 or values["pipeline_parallel_degree"] > 1:
        return None
    rule = "a single stage has nothing to balance"
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=0.")


def _rebalance_needs_measured_step(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] != 1:
        return None
    rule = "it must be 0 or at least 2, because the first step is recorded, not measured"
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=5.")


def _rebalance_needs_auto_partition(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] == 0 or values["auto_partition"]:
        return None
    rule = "it must be 0 because auto_partition is False: the stages are chosen by hand"
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=0.")


def _rebalance_excludes_file(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] == 0 or values["pipeline"] != "file":
        return None
    rule = 'it must be 0 because pipeline is "file", whose order is for one split'
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=0.")


def _rebalance_excludes_sharded_state(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] == 0 or not values["shard_optimizer_state"]:
        return None
    rule = "it must be 0 because shard_optimizer_state is True: replicas hold different state"
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=0.")


def _rebalance_excludes_fp16(values: Values) -> Problem | None:
    if values["rebalance_after_steps"] == 0 or not values["fp16"]:
        return None
    rule = "it must be 0 because fp16 is True: the float32 copies of the weights cannot move"
    return _problem(values, "rebalance_after_steps", rule, "Use rebalance_after_steps=0.")


def _backend_needs_compile(values: Values) -> Problem | None:
    if values["compile"] or values["compile_backend"] == "inductor":
        return None
    rule = "it needs compile=True"
    return _problem(values, "compile_backend", rule, "Use compile=True.")


def _file_pipeline_needs_file(values: Values) -> Problem | None:
    if values["pipeline"] != "file" or values["schedule_file"] is not None:
        return None
    rule = 'it must be given because pipeline is "file"'
    return _problem(values, "schedule_file", rule, "Give the path of a schedule.")


def _file_needs_file_pipeline(values: Values) -> Problem | None:
    if values["schedule_file"] is None or values["pipeline"] == "file":
        return None
    rule = f'it needs pipeline="file", but pipeline is "{values["pipeline"]}"'
    return _problem(values, "schedule_file", rule, 'Use pipeline="file" or remove schedule_file.')


def _limit_needs_other_than_simple(values: Values) -> Problem | None:
    if values["activation_limit_mb"] is None or values["pipeline"] != "simple":
        return None
    rule = 'it must be None because pipeline="simple" keeps every microbatch\'s activations'
    return _problem(values, "activation_limit_mb", rule, 'Use pipeline="auto".')


def _backend_needs_ddp(values: Values) -> Problem | None:
    if values["ddp"] is not False or values["ddp_dist_backend"] == "auto":
        return None
    fix = "Use ddp=True or remove ddp_dist_backend."
    return _problem(values, "ddp_dist_backend", "it needs data parallelism, but ddp is False", fix)


def _port_needs_ddp(values: Values) -> Problem | None:
    if values["ddp"] is not False or values["ddp_port"] is None:
        return None
    fix = "Remove ddp_port."
    return _problem(values, "ddp_port", "it needs data parallelism, but ddp is False", fix)


def _horovod_excludes_ddp(values: Values) -> Problem | None:
    if not (values["horovod"] and values["ddp"]):
        return None
    return _problem(values, "horovod", "it excludes ddp", "Use horovod=False.")


def _tensor_needs_ddp(values: Values) -> Problem | None:
    if values["tensor_parallel_degree"] == 1 or values["ddp"] is not False:
        return None
    rule = "it must not be False because tensor_parallel_degree > 1"
    return _problem(values, "ddp", rule, "Use ddp=True.")


def _sharding_needs_ddp(values: Values) -> Problem | None:
    if values["sharded_data_parallel_degree"] == 1 or values["ddp"] is not False:
        return None
    rule = "it must not be False because sharded_data_parallel_degree > 1"
    return _problem(values, "ddp", rule, "Use ddp=True.")


def _sharding_excludes_pipeline(values: Values) -> Problem | None:
    if values["sharded_data_parallel_degree"] == 1 or values["pipeline_parallel_degree"] == 1:
        return None
    rule = "it must be 1 because pipeline_parallel_degree > 1"
    fix = "Use sharded_data_parallel_degree=1 or pipeline_parallel_degree=1."
    return _problem(values, "sharded_data_parallel_degree", rule, fix)


def _sharding_excludes_sharded_state(values: Values) -> Problem | None:
    if values["sharded_data_parallel_degree"] == 1 or not values["shard_optimizer_state"]:
        return None
    rule = "it must be False because sharded_data_parallel_degree > 1 shards that state already"
    return _problem(values, "shard_optimizer_state", rule, "Use shard_optimizer_state=False.")


def _sharding_and_tensor_need_prescaling(values: Values) -> Problem | None:
    both = values["sharded_data_parallel_degree"] > 1 and values["tensor_parallel_degree"] > 1
    if not both or values["prescaled_batch"]:
        return None
    rule = "it must be True for sharded data and tensor parallelism together"
    return _problem(values, "prescaled_batch", rule, "Use prescaled_batch=True.")


def _one_half_precision(values: Values) -> Problem | None:
    if not (values["fp16"] and values["bf16"]):
        return None
    return _problem(values, "bf16", "it excludes fp16", "Keep one of them.")


_RULES: Final[tuple[_Rule, ...]] = (
    _Rule(("auto_partition", "default_partition"), _manual_partition_needs_default),
    _Rule(("pipeline_parallel_degree", "default_partition"), _default_partition_exists),
    _Rule(("virtual_pipeline_degree", "auto_partition"), _virtual_needs_auto_partition),
    _Rule(("virtual_pipeline_degree", "pipeline_parallel_degree"), _virtual_needs_stages),
    _Rule(("virtual_pipeline_degree", "partition_policy"), _virtual_needs_contiguous),
    _Rule(("timeline_every_n_steps", "pipeline_parallel_degree"), _timeline_needs_stages),
    _Rule(("rebalance_after_steps", "pipeline_parallel_degree"), _rebalance_needs_stages),
    _Rule(("rebalance_after_steps",), _rebalance_needs_measured_step),
    _Rule(("rebalance_after_steps", "auto_partition"), _rebalance_needs_auto_partition),
    _Rule(("rebalance_after_steps", "pipeline"), _rebalance_excludes_file),
    _Rule(("rebalance_after_steps", "shard_optimizer_state"), _rebalance_excludes_sharded_state),
    _Rule(("rebalance_after_steps", "fp16"), _rebalance_excludes_fp16),
    _Rule(("compile", "compile_backend"), _backend_needs_compile),
    _Rule(("pipeline", "schedule_file"), _file_pipeline_needs_file),
    _Rule(("pipeline", "schedule_file"), _file_needs_file_pipeline),
    _Rule(("pipeline", "activation_limit_mb"), _limit_needs_other_than_simple),
    _Rule(("ddp", "ddp_dist_backend"), _backend_needs_ddp),
    _Rule(("ddp", "ddp_port"), _port_needs_ddp),
    _Rule(("ddp", "horovod"), _horovod_excludes_ddp),
    _Rule(("ddp", "tensor_parallel_degree"), _tensor_needs_ddp),
    _Rule(("ddp", "sharded_data_parallel_degree"), _sharding_needs_ddp),
    _Rule(
        ("sharded_data_parallel_degree", "pipeline_parallel_degree"), _sharding_excludes_pipeline
    ),
    _Rule(
        ("sharded_data_parallel_degree", "shard_optimizer_state"), _sharding_excludes_sharded_state
    ),
    _Rule(
        ("sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"),
        _sharding_and_tensor_need_prescaling,
    ),
    _Rule(("fp16", "bf16"), _one_half_precision),
)


def _degrees_divide(values: Values, world_size: int) -> Problem | None:
    stages, tensor = values["pipeline_parallel_degree"], values["tensor_parallel_degree"]
    if world_size % (stages * tensor) == 0:
        return None
    product = "" if tensor == 1 else f" (times tensor_parallel_degree {tensor})"
    rule = f"it{product} must divide the world size {world_size}"
    if world_size % tensor:
        fix = f"Start a multiple of {stages * tensor} ranks."
    else:
        near = " or ".join(map(str, nearest_divisors(stages, world_size // tensor)))
        fix = f"Use {near}, or start a multiple of {stages * tensor} ranks."
    return _problem(values, "pipeline_parallel_degree", rule, fix)


def _replicas_need_ddp(values: Values, world_size: int) -> Problem | None:
    replicas = world_size // values["pipeline_parallel_degree"]
    if values["ddp"] is not False or replicas <= 1:
        return None
    rule = f"it must not be False, because {world_size} ranks make {replicas} replicas"
    return _problem(values, "ddp", rule, "Use ddp=True, or leave it out.")
