"""The configuration and the single table of its keys.

To enable a capability, remove `support=Support.PLANNED` (and `instead`) from its key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

from lightning_smp.config.keys import Key, Support, key, keys_of
from lightning_smp.config.kinds import Choice, Flag, NameStyles, Number, Text, Whole
from lightning_smp.config.problems import config_error
from lightning_smp.config.rules import cross_problems, world_problems
from lightning_smp.topology import PLACEMENTS, Topology

__all__ = ["KEYS", "SMPConfig"]

_UNDOCUMENTED: Final = "seen in published scripts; its meaning was never documented"


@dataclass(frozen=True, slots=True, kw_only=True)
class SMPConfig:
    """A valid configuration; see docs/configuration.md for every key.

    Raises:
        ConfigError: lists every value that breaks a rule, with its smallest fix.
    """

    # --- pipeline
    pipeline_parallel_degree: int = key(
        Whole(),
        1,
        "number of stages; with the tensor degree it must divide the number of ranks",
        aliases=("partitions",),
    )
    virtual_pipeline_degree: int = key(
        Whole(), 1, "contiguous chunks of the model on each stage; needs `auto_partition`"
    )
    microbatches: int = key(Whole(), 1, "parts that a rank's batch is split into")
    pipeline: Literal["simple", "interleaved", "zero_bubble", "auto", "file"] = key(
        Choice(("simple", "interleaved", "zero_bubble", "auto", "file")),
        "interleaved",
        "order of a step: all forwards before all backwards, backwards as soon as possible, these "
        "in two parts, the fastest of the three by estimate, or that of `schedule_file`",
    )
    schedule_file: str | None = key(
        Text(), None, 'file with the order of a step, for pipeline="file"; see docs/schedules.md'
    )
    active_microbatches: int | None = key(
        Whole(),
        None,
        "microbatches in flight at once; None: number of stages + 2, or twice the number of stages "
        "with a `virtual_pipeline_degree`",
    )
    activation_limit_mb: float | None = key(
        Number(0, above_low=True),
        None,
        "MiB of activations that a stage may keep at once, by estimate; None: no limit",
    )
    timeline_every_n_steps: int = key(
        Whole(0),
        0,
        "measure where the time of every n-th training step goes and log it; 0: never; see "
        "docs/timeline.md",
    )
    rebalance_after_steps: int = key(
        Whole(0),
        0,
        "measure the units of the model over this many training steps, then move them so that the "
        "stages take equally long; 0: never; see docs/rebalance.md",
    )
    compile: bool = key(
        Flag(), False, "compile each unit with `torch.compile`; see docs/compile.md"
    )
    compile_backend: str = key(Text(), "inductor", "what `torch.compile` compiles with")
    deterministic_server: bool = key(
        Flag(), False, "same order of work on all replicas; the order is fixed in either case"
    )

    # --- partition
    auto_partition: bool = key(
        Flag(), True, "split the model automatically; if False, by hand and `default_partition`"
    )
    default_partition: int | None = key(
        Whole(0), None, "stage of modules that no one placed; required without `auto_partition`"
    )
    partition_policy: Literal["contiguous", "tree"] = key(
        Choice(("contiguous", "tree")),
        "contiguous",
        "rule of the automatic split: the best one in execution order, or SMP's, which deals the "
        "stages out from the root of the module tree",
    )
    optimize: Literal["memory", "speed"] = key(
        Choice(("memory", "speed")), "memory", "what the default of `memory_weight` favours"
    )
    memory_weight: float | None = key(
        Number(0, 1),
        None,
        'balance of the split: 0 only compute, 1 only memory; None: 0.8 to optimize "memory", '
        '0.2 to optimize "speed"',
    )
    tied_parameters: Literal["auto", "together", "mirrored"] = key(
        Choice(("auto", "together", "mirrored")),
        "auto",
        "modules that share a parameter: on one stage, or a copy on each stage with summed "
        "gradients; auto takes the faster one",
    )
    load_partition: bool = key(
        Flag(),
        False,
        "reuse a saved partition",
        support=Support.PLANNED,
        instead="Remove it and place modules with smp.partition to fix the split.",
    )
    partition_file: str | None = key(
        Text(),
        None,
        "file of the saved partition",
        support=Support.PLANNED,
        instead="Remove it and place modules with smp.partition to fix the split.",
    )
    contiguous: bool = key(
        Flag(),
        True,
        "TensorFlow only: stages hold neighbouring operations",
        support=Support.PLANNED,
        instead="Remove it: it never had a meaning for PyTorch.",
    )
    skip_tracing: bool = key(
        Flag(),
        False,
        "split by parameter counts in module order, without a run of the step on fake tensors",
    )

    # --- ranks and data parallelism
    placement_strategy: str = key(
        Choice(PLACEMENTS),
        "cluster",
        "order of data (D), pipeline (P) and tensor (T) coordinates in the rank, slowest first; "
        "cluster is DPT, spread is TPD",
    )
    ddp: bool | None = key(
        Flag(), None, "data parallelism; None: where there is more than one replica"
    )
    ddp_port: int | None = key(
        Whole(0),
        None,
        "scripts: port at which the ranks meet, where the launcher names none by MASTER_PORT",
    )
    ddp_dist_backend: Literal["auto", "nccl"] = key(
        Choice(("auto", "nccl")),
        "auto",
        "library for collectives between replicas; auto is NCCL on GPUs and gloo on CPUs",
    )
    bucket_cap_mb: float = key(
        Number(0, above_low=True), 25.0, "MiB of gradients that are reduced together"
    )
    drop_last: bool = key(
        Flag(), True, "drop samples that do not fill a batch on every replica and microbatch"
    )
    batch_source: Literal["each", "leader"] = key(
        Choice(("each", "leader")),
        "each",
        "who loads a batch: each rank of a pipeline, or its first rank, which sends it",
    )
    horovod: bool = key(
        Flag(),
        False,
        "data parallelism by Horovod",
        support=Support.PLANNED,
        instead="Use ddp=True; Horovod was for TensorFlow.",
    )

    # --- tensor parallelism
    tensor_parallel_degree: int = key(Whole(), 1, "ranks that split one module")
    tensor_parallel_modules: str | Mapping[str, str] | None = key(
        NameStyles("auto"),
        None,
        "what is split: registered classes and known Hugging Face models too, or modules by name "
        'in the styles "column", "row", "embedding", "vocab" and "block"; None: what contexts mark',
    )
    tensor_parallel_weights: Literal["slice", "reinit"] = key(
        Choice(("slice", "reinit")),
        "slice",
        "weights of a module that is split: its part of the original's, or fresh ones",
    )
    prescaled_batch: bool = key(
        Flag(), False, "the ranks of a tensor group get the same batch; nothing changes at degree 1"
    )
    fp16_params: bool = key(
        Flag(),
        False,
        "distributed modules are made in float16",
        support=Support.PLANNED,
        instead='Remove it and use fp16=True in a script, Trainer(precision="16-true") elsewhere.',
    )

    # --- sharding and memory
    sharded_data_parallel_degree: int = key(
        Whole(), 1, "ranks that parameters are sharded over", support=Support.PLANNED
    )
    sdp_reduce_bucket_size: int = key(
        Whole(), 500_000_000, "elements of gradient reduced together", support=Support.PLANNED
    )
    sdp_param_persistence_threshold: int = key(
        Whole(0), 1_000_000, "parameters with fewer elements stay whole", support=Support.PLANNED
    )
    sdp_max_live_parameters: int = key(
        Whole(), 1_000_000_000, "elements gathered at once", support=Support.PLANNED
    )
    sdp_hierarchical_allgather: bool = key(
        Flag(), True, "gather within a node first", support=Support.PLANNED
    )
    sdp_gradient_clipping: float = key(
        Number(0, above_low=True),
        1.0,
        "norm that gradients are clipped to under sharding",
        support=Support.PLANNED,
        instead="Remove it and use Trainer(gradient_clip_val=...).",
    )
    shard_optimizer_state: bool = key(
        Flag(), False, "optimizer state is split over the replicas", support=Support.PLANNED
    )
    offload_activations: bool = key(
        Flag(), False, "checkpointed activations wait in host memory", support=Support.PLANNED
    )
    activation_loading_horizon: int = key(
        Whole(), 4, "tasks ahead that activations are loaded back", support=Support.PLANNED
    )
    delayed_parameter_initialization: bool = key(
        Flag(),
        False,
        "what is built in `configure_model` or `Trainer.init_module` gets no memory before the "
        "split; as `smp.delay_param_initialization`",
    )

    # --- precision
    fp16: bool = key(
        Flag(),
        False,
        "scripts: float16 parameters, float32 master weights and loss scaling",
    )
    bf16: bool = key(
        Flag(),
        False,
        "bfloat16",
        support=Support.PLANNED,
        instead='Remove it and use Trainer(precision="bf16-mixed").',
    )

    # --- run
    reproducible: bool = key(
        Flag(), True, "dropout and other draws in the model do not depend on the stages"
    )
    timeout: float = key(
        Number(0, above_low=True), 300.0, "seconds until a silent rank is an error"
    )

    # --- accepted for published scripts
    static_mode: bool = key(Flag(), False, _UNDOCUMENTED, support=Support.NO_EFFECT)
    fast_mode: bool = key(Flag(), False, _UNDOCUMENTED, support=Support.NO_EFFECT)
    checkpoint_attentions: bool = key(Flag(), False, _UNDOCUMENTED, support=Support.NO_EFFECT)
    overlapping_allreduce: bool = key(Flag(), True, _UNDOCUMENTED, support=Support.NO_EFFECT)
    _match_weights: bool = key(Flag(), False, _UNDOCUMENTED, support=Support.NO_EFFECT)
    _fp32_grad_accumulation: bool = key(Flag(), False, _UNDOCUMENTED, support=Support.NO_EFFECT)

    def __post_init__(self) -> None:
        values = self.as_dict()
        problems = [p for name, value in values.items() for p in KEYS[name].problems(value)]
        problems += cross_problems(values, KEYS)
        if problems:
            raise config_error(problems)
        for name, value in values.items():
            if isinstance(value, Mapping):
                object.__setattr__(self, name, dict(value))
            elif isinstance(KEYS[name].kind, Number) and value is not None:
                # So that 300 and 300.0 have one fingerprint.
                object.__setattr__(self, name, float(value))

    @property
    def partitions(self) -> int:
        """SMP's older name of `pipeline_parallel_degree`."""
        return self.pipeline_parallel_degree

    @property
    def active_microbatch_limit(self) -> int:
        """Microbatches in flight at once, with the default filled in."""
        if self.active_microbatches is not None:
            return self.active_microbatches
        stages = self.pipeline_parallel_degree
        return stages + (max(stages, 2) if self.virtual_pipeline_degree > 1 else 2)

    @property
    def partition_memory_weight(self) -> float:
        """Weight of memory against compute in the split, with the default filled in."""
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.8 if self.optimize == "memory" else 0.2

    def topology(self, world_size: int) -> Topology:
        """Return the grid of `world_size` ranks.

        Raises:
            ConfigError: as `validate_world`.
        """
        self.validate_world(world_size)
        return Topology.from_world(
            world_size,
            pipeline=self.pipeline_parallel_degree,
            tensor=self.tensor_parallel_degree,
            placement=self.placement_strategy,
        )

    def validate_world(self, world_size: int) -> None:
        """Check the rules that need the number of ranks.

        Raises:
            ConfigError: the degrees do not divide `world_size` (the nearest that do are named),
                or there would be replicas although `ddp` is False.
        """
        problems = world_problems(self.as_dict(), KEYS, world_size)
        if problems:
            raise config_error(problems)

    def as_dict(self) -> dict[str, bool | int | float | str | Mapping[str, str] | None]:
        """Return all keys and values, ready for JSON and for ``SMPConfig(**values)``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def fingerprint(self) -> str:
        """Return a hash (hex) that is equal exactly where all values are equal."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


KEYS: Final[dict[str, Key]] = keys_of(SMPConfig)
