"""From what the user names to a model without memory, and a step that can be analysed."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_smp.deferred import default_dtype, deferring
from lightning_smp.errors import ConfigError
from lightning_smp.partitioning import Analysis, analyze, fake_batch, find_atoms, new_fake_mode
from lightning_smp.partitioning.atoms import Atom, is_lightning_module
from lightning_smp.partitioning.device import DeviceModel
from lightning_smp.planning.as_gpu import AsGpu
from lightning_smp.planning.profile import Profile

__all__ = ["PRECISIONS", "Source", "class_source", "hugging_face_source"]

PRECISIONS: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "16-true": (torch.float16, None),
    "bf16-true": (torch.bfloat16, None),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
"""Lightning's name -> (type of the parameters, type under autocast)."""

_ANALYSED = (2, 4)  # samples; not 1, for which some copies are views


@dataclass(frozen=True, slots=True)
class Source:
    """A model and what a step does with one sample.

    Attributes:
        name: For people.
        root: The model, without memory.
        step: Called as ``step(copy, batch)``.
        batch: One microbatch of one sample.
        tokens: What a sample counts as, for the throughput.
        unit: The name of that: "tokens" or "samples".
        max_tensor_degree: Most ranks that can split one module, None where unknown.
        precision: A key of ``PRECISIONS``.
    """

    name: str
    root: nn.Module
    step: Callable[[nn.Module, Any], Any]
    batch: Any
    tokens: int
    unit: str
    max_tensor_degree: int | None
    precision: str

    def profile(self, device: DeviceModel) -> tuple[tuple[Atom, ...], Profile]:
        """Runs the step on fake tensors; returns the atoms and what they cost."""
        atoms = find_atoms(self.root)
        analyses = {}
        for samples in _ANALYSED:
            found = analyses[samples] = self._analyze(atoms, device, samples)
            if found.reason is not None:
                return atoms, Profile({samples: found}, device)
        return atoms, Profile(analyses, device)

    def _analyze(self, atoms: tuple[Atom, ...], device: DeviceModel, samples: int) -> Analysis:
        mode = new_fake_mode()
        batch = fake_batch(_repeated(self.batch, samples), mode)

        def run(copy: nn.Module) -> Any:
            with _autocast(self.precision), AsGpu():
                return self.step(copy, batch)

        return analyze(self.root, run, atoms, mode=mode, device=device)


def _repeated(batch: Any, samples: int) -> Any:
    """A batch of more samples: its tensors have one along their first dimension."""
    return tree_map(lambda tensor: tensor.repeat(samples, *[1] * (tensor.dim() - 1)), batch)


def _autocast(precision: str) -> AbstractContextManager[Any]:
    half = PRECISIONS[precision][1]
    return nullcontext() if half is None else torch.autocast("cpu", half)


def hugging_face_source(
    what: str, *, sequence_length: int | None, precision: str, overrides: Mapping[str, Any]
) -> Source:
    """Makes a causal language model of a Hugging Face configuration. Nothing is downloaded.

    Args:
        what: The path of a ``config.json``, of a folder with one, or a model type that
            transformers knows (its default sizes).
        sequence_length: Tokens of a sample; None: what the model allows, at most 4096.
        precision: A key of ``PRECISIONS``.
        overrides: Values that replace those of the configuration.

    Raises:
        ConfigError: If transformers is missing, or the configuration is unknown or unreadable.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError("A Hugging Face config needs transformers: pip install it.") from None
    config = _hugging_face_config(what, overrides)
    limit = int(getattr(config, "max_position_embeddings", 0) or 4096)
    length = sequence_length or min(limit, 4096)
    try:
        with torch.device("meta"):
            root = AutoModelForCausalLM.from_config(config, dtype=PRECISIONS[precision][0])
    except Exception as error:  # each model has checks of its own
        reason = str(error).partition("\n")[0]  # the rest lists all models there are
        raise ConfigError(
            f"transformers cannot make a causal language model of {what!r}: {reason} Other models "
            "are planned as a class: file.py:Class, with --input."
        ) from error
    heads = [
        int(value)
        for key in ("num_attention_heads", "num_key_value_heads", "n_head")
        if (value := getattr(config, key, None))
    ]
    return Source(
        name=f"{type(root).__name__} of {what}",
        root=root.train(),
        step=_language_step,
        batch={"input_ids": torch.zeros(1, length, dtype=torch.long)},
        tokens=length,
        unit="tokens",
        max_tensor_degree=min(heads, default=None),
        precision=precision,
    )


def _language_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    ids = batch["input_ids"]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _hugging_face_config(what: str, overrides: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    path = Path(what)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(path)!r} is no readable JSON file: {error}.") from error
        if not isinstance(values, dict) or "model_type" not in values:
            raise ConfigError(
                f"{str(path)!r} has no 'model_type', so it is no Hugging Face configuration; add "
                'it (for example "llama").'
            )
        kind = values.pop("model_type")
    else:
        kind, values = what, {}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=3)
        hint = f" Near: {', '.join(near)}." if near else ""
        raise ConfigError(
            f"{what!r} is neither a file nor a model type that transformers knows.{hint} Nothing "
            "is downloaded: give the path of a config.json."
        )
    known = CONFIG_MAPPING[kind]()
    unknown = sorted(key for key in overrides if not hasattr(known, key))
    if unknown:
        raise ConfigError(f"A {kind!r} configuration has no {', '.join(map(repr, unknown))}.")
    try:
        return CONFIG_MAPPING[kind].from_dict({**values, **overrides})
    except Exception as error:  # each configuration has checks of its own
        raise ConfigError(f"{what!r} is no valid {kind!r} configuration: {error}") from error


def class_source(
    what: str, *, inputs: Sequence[str], precision: str, arguments: Mapping[str, Any]
) -> Source:
    """Makes a module of a class or function, and its ``training_step`` if it has one.

    Args:
        what: ``package.module:Class`` or ``path/to/file.py:Class``. A file is executed.
        inputs: What a batch holds, each ``[name=]type:sizes`` for one sample, for example
            ``float32:3x224x224`` or ``input_ids=int64:128``. With names a batch is a dict, without
            a tuple (or the tensor itself if there is one).
        precision: A key of ``PRECISIONS``.
        arguments: Keyword arguments of the class.

    Raises:
        ConfigError: If it cannot be found or made, or an input cannot be read.
    """
    if not inputs:
        raise ConfigError(
            f"{what!r} needs to know a batch: give --input type:sizes for each tensor of one "
            "sample, for example --input float32:3x224x224 --input int64:"
        )
    batch = _batch(inputs)
    make = _load(what)
    dtype, _ = PRECISIONS[precision]
    try:
        with default_dtype(dtype):
            root = _without_memory(lambda: _made(make, arguments))
    except Exception as error:  # the user's code
        raise ConfigError(f"{what!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(root, nn.Module):
        raise ConfigError(f"{what!r} makes a {type(root).__name__}, not a torch.nn.Module.")
    return Source(
        name=what,
        root=root.train(),
        step=_training_step if is_lightning_module(root) else _forward,
        batch=batch,
        tokens=1,
        unit="samples",
        max_tensor_degree=None,
        precision=precision,
    )


def _without_memory(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, on the meta device; or, where it asks for values, with deferred ones."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        with deferring():
            return make()


def _made(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    root = make(**arguments)
    configure = getattr(root, "configure_model", None)
    if callable(configure):
        configure()
    return root


def _training_step(model: Any, batch: Any) -> Any:
    return model.training_step(batch, 0)


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _load(what: str) -> Callable[..., Any]:
    place, _, name = what.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
        found: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # the user's code
        raise ConfigError(
            f"{what!r} cannot be imported: {type(error).__name__}: {error}."
        ) from error
    return found


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules beside the user, as with python -m
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _batch(inputs: Sequence[str]) -> Any:
    named: dict[str, Tensor] = {}
    plain: list[Tensor] = []
    for text in inputs:
        name, equals, rest = text.rpartition("=")
        tensor = _tensor(text, rest)
        if equals:
            named[name] = tensor
        else:
            plain.append(tensor)
    if named and plain:
        raise ConfigError("Give either all inputs a name or none.")
    if named:
        return named
    return plain[0] if len(plain) == 1 else tuple(plain)


def _tensor(text: str, spec: str) -> Tensor:
    kind, colon, sizes = spec.partition(":")
    dtype = getattr(torch, kind, None)
    parts = sizes.split("x") if sizes else []
    if not colon or not isinstance(dtype, torch.dtype) or not all(p.isdigit() for p in parts):
        raise ConfigError(
            f"--input {text!r} must read [name=]type:sizes, for example float32:3x224x224."
        )
    return torch.zeros(1, *map(int, parts), dtype=dtype)
