"""`python -m lightning_smp plan`: what a run needs and how it is best laid out; no GPU needed."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from lightning_smp.errors import ConfigError, SMPError
from lightning_smp.planning import (
    DEVICES,
    Device,
    Estimator,
    Setup,
    Source,
    class_source,
    describe,
    hugging_face_source,
    search,
)
from lightning_smp.planning.sources import PRECISIONS
from lightning_smp.schedule.scheduler import PipelineKind

__all__ = ["main"]

_GIB = 2**30
_STATES = {"adam": 2, "momentum": 1, "sgd": 0}
_FIXED = {
    "pp": "pipeline_parallel_degree",
    "tp": "tensor_parallel_degree",
    "virtual": "virtual_pipeline_degree",
    "microbatches": "microbatches",
    "microbatch_size": "microbatch_size",
}


def main(arguments: Sequence[str]) -> int:
    """Print a plan; the exit status is 0 if something fits, 1 if nothing does, 2 for bad input."""
    options = _parser().parse_args(list(arguments))
    try:
        text, fits = _plan(options)
    except SMPError as error:
        sys.stderr.write(f"python -m lightning_smp plan: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0 if fits else 1


def _plan(options: argparse.Namespace) -> tuple[str, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = _source(options)
        logging.getLogger("transformers").setLevel(logging.ERROR)  # its import has set it
        device = _device(options)
        memory = _usable(device.memory, options.reserve * _GIB)
        atoms, profile = source.profile(device.model())
    setup = Setup(
        world_size=options.world_size,
        memory=memory,
        device=device,
        gpus_per_host=options.gpus_per_host,
        batch_size=options.batch_size or 2 * options.world_size,
        optimizer_states=_STATES[options.optimizer],
        pipeline=options.pipeline,
        memory_weight=options.memory_weight,
    )
    estimator = Estimator(source.root, atoms, profile, setup)
    fixed: dict[str, int | bool] = {
        key: value for key, name in _FIXED.items() if (value := getattr(options, name)) is not None
    }
    if options.recompute != "auto":
        fixed["recompute"] = options.recompute == "yes"
    found = search(estimator, fixed=fixed, max_tensor_degree=source.max_tensor_degree)
    return describe(source, estimator, found, width=options.width), bool(found.best)


def _usable(memory: float, reserve: float) -> float:
    if reserve >= memory:
        raise ConfigError(
            f"Of {memory / _GIB:g} GiB on a GPU, --reserve {reserve / _GIB:g} leaves nothing. Give "
            "a larger --memory or a smaller --reserve."
        )
    return memory - reserve


def _source(options: argparse.Namespace) -> Source:
    settings = {key: _value(text) for key, _, text in (s.partition("=") for s in options.set)}
    if ":" in options.model:
        return class_source(
            options.model, inputs=options.input, precision=options.precision, arguments=settings
        )
    return hugging_face_source(
        options.model,
        sequence_length=options.sequence_length,
        precision=options.precision,
        overrides=settings,
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _device(options: argparse.Namespace) -> Device:
    given = {
        "flops_16": options.tflops and options.tflops * 1e12,
        "flops_32": options.tflops and options.tflops * 1e12,
        "bandwidth": options.bandwidth and options.bandwidth * 1e9,
        "memory": options.memory and options.memory * _GIB,
        "link": options.link and options.link * 1e9,
        "network": options.network and options.network * 1e9,
        "compute_share": options.efficiency,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    return replace(DEVICES[options.device], **changes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m lightning_smp plan", description=__doc__)
    add = parser.add_argument
    add(
        "model",
        help="config.json or its folder, a model type of transformers (llama), or a class: "
        "package.module:Class, file.py:Class",
    )
    add("--world-size", type=_count, required=True, metavar="N", help="number of GPUs")
    add("--batch-size", type=_count, metavar="N", help="samples of a step over all GPUs; 2 a GPU")
    add("--sequence-length", type=_count, metavar="N", help="tokens of a sample; at most 4096")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="value of the configuration, or argument of the class (JSON)")  # fmt: skip
    add("--input", action="append", default=[], metavar="[NAME=]TYPE:SIZES",
        help="for a class: a tensor of one sample, as float32:3x224x224")  # fmt: skip
    add("--precision", choices=PRECISIONS, default="bf16-mixed")
    add("--optimizer", choices=_STATES, default="adam")
    add("--pipeline", choices=get_args(PipelineKind), default="interleaved")
    add("--memory-weight", type=float, default=0.2, help="balance of the split, as in SMPStrategy")
    add("--recompute", choices=("auto", "yes", "no"), default="auto",
        help="activation checkpointing of every unit")  # fmt: skip
    add("--width", type=_count, default=120, help="columns of the picture")
    _add_machine(parser)
    _add_degrees(parser)
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=DEVICES, default="h100", help="takes its figures from the data sheet")
    add("--gpus-per-host", type=_count, default=8, metavar="N")
    add("--memory", type=_amount, metavar="GIB", help="memory of a GPU")
    add("--reserve", type=_amount_or_none, default=2.0, metavar="GIB",
        help="of it for the CUDA context, NCCL and fragments (default: %(default)s)")  # fmt: skip
    add("--tflops", type=_amount, help="peak of the precision, in tera operations per second")
    add(
        "--efficiency",
        type=_amount,
        metavar="SHARE",
        help="share of that peak that products attain",
    )
    add("--bandwidth", type=_amount, metavar="GB/S", help="of memory")
    add("--link", type=_amount, metavar="GB/S", help="to a GPU of the same host")
    add("--network", type=_amount, metavar="GB/S", help="to a GPU of another host")


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("degrees", "searched, unless given")
    for short, name in _FIXED.items():
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{short.replace('_', '-')}"))
        group.add_argument(*flags, dest=name, type=_count, metavar="N")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _amount(text: str) -> float:
    value = _amount_or_none(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return value


def _amount_or_none(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number from 0 on")
    return value
