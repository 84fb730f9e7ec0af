"""Host cost of placed execution where a rank owns 1 of many layers of a Hugging Face model.

Rank 1 owns the middle layer, rank 0 all the rest. After real steps have recorded the program, rank
1 follows it again and again by itself: received tensors are empty ones, sends go nowhere. So every
repetition finds warm caches and waits for nobody. Its CPU time for one microbatch's forward, minus
the layer's own forward and the model's own outer Python, is what placed execution costs. The outer
Python is the same model with every unit replaced by a function that returns what it returned once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engine_setup import split_module, stepper_of, train_step
from benchmarks.measure import alternate
from lightning_smp.engine import PipelineEngine
from lightning_smp.partitioning import find_atoms
from lightning_smp.placed.outer import OuterMode, outer_patches
from lightning_smp.placed.run import MicrobatchRun
from lightning_smp.placed.runtime import StepContext
from lightning_smp.program import Edge

__all__ = ["placed_host_cost"]

_VOCABULARY, _WIDTH, _HEADS, _ROWS, _LENGTH = 64, 16, 2, 1, 8
_MICROBATCHES = 8


class LanguageModel(pl.LightningModule):
    """A Hugging Face model, trained as its documentation says."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def placed_host_cost(rank: int, family: str, layers: int, rounds: int) -> dict[str, Any]:
    """Measures one model on rank 1. Collective over the world."""
    torch.manual_seed(0)
    module = LanguageModel(_model(family, layers))
    owned = _layers_name(family) + f".{layers // 2}"
    batch = torch.randint(0, _VOCABULARY, (_ROWS * 2, _LENGTH))
    piece = batch[:_ROWS]
    outer = _outer_step(deepcopy(module), piece)
    maths = _layer_step(deepcopy(module), owned, piece)
    deployment = split_module(module, piece, {owned: 1}, rank=rank, pipeline="interleaved")
    engine = deployment.engine
    assert engine is not None
    step = train_step(stepper_of(deployment), batch, 2)
    for _ in range(2):
        step()
    dist.barrier()
    if rank == 0:
        return {}
    contenders = {"smp": _followed(module, engine, piece), "outer": outer, "maths": maths}
    for contender in contenders.values():
        contender()
    runs = alternate(
        contenders, microbatches=_MICROBATCHES, rounds=rounds, repeats=1, together=False
    )
    return {name: [asdict(cost) for cost in costs] for name, costs in runs.items()}


def _followed(module: LanguageModel, engine: PipelineEngine, piece: Tensor) -> Callable[[], None]:
    """Forwards that follow the recorded program without the other rank."""
    (program,) = engine._programs.values()
    alone = _Alone()
    runtime = engine.runtime

    def forward() -> None:
        context = StepContext(runtime, alone, engine.control, alone, (0,))  # type: ignore[arg-type]
        run = MicrobatchRun(context, 0)
        runs = []
        with outer_patches(run):
            for index in range(_MICROBATCHES):
                run = MicrobatchRun(context, index)
                run.follow(program)
                former = runtime.activate(run)
                with OuterMode(run):
                    module.training_step(piece, 0)
                runtime.activate(former)
                assert run.following
                assert run.position == len(run.entries)
                runs.append(run)
            for run in runs:
                run.close()

    return forward


class _Alone:
    """Channels and engine of a rank without peers: what arrives is zeros, what is sent is gone."""

    context: Any = None

    def send(self, tensor: Tensor, stage: int, *, copy: bool) -> None:
        """Drops the tensor."""

    def receive(self, run: MicrobatchRun, edge: Edge) -> Tensor:
        """Zeros of the edge's shape."""
        return torch.zeros(edge.spec.shape, dtype=edge.spec.dtype)

    def pause(self, run: MicrobatchRun) -> None:
        """Goes on at once."""

    def deviated(self, run: MicrobatchRun, position: int, key: tuple[Any, ...]) -> None:
        """The program must fit, or the figure would mean nothing."""
        raise AssertionError(f"call {position} left the program: {key}")

    def backward(self, *_: Any) -> None:
        """The step asks for none."""


def _model(family: str, layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=layers,
                n_head=_HEADS, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH,
            num_hidden_layers=layers, num_attention_heads=_HEADS, num_key_value_heads=_HEADS,
            max_position_embeddings=_LENGTH,
        )
    )  # fmt: skip


def _layers_name(family: str) -> str:
    return "model.transformer.h" if family == "gpt2" else "model.model.layers"


def _outer_step(module: LanguageModel, piece: Tensor) -> Callable[[], None]:
    """The step's Python without its units: each returns what it returned once."""
    atoms = find_atoms(module)
    kept: dict[int, Any] = {}

    def note(inner: nn.Module, _: Any, result: Any) -> None:
        kept[id(inner)] = result

    handles = [atom.module.register_forward_hook(note) for atom in atoms]
    with torch.no_grad():
        module.training_step(piece, 0)
    for handle in handles:
        handle.remove()
    for atom in atoms:
        result = kept.get(id(atom.module))
        atom.module.forward = lambda *args, result=result, **kwargs: result

    def step() -> None:
        for _ in range(_MICROBATCHES):
            module.training_step(piece, 0)

    return step


def _layer_step(module: LanguageModel, owned: str, piece: Tensor) -> Callable[[], None]:
    """Forward of the owned layer, with the operands that the model gives it."""
    layer = module.get_submodule(owned)
    seen: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        module.training_step(piece, 0)
    handle.remove()
    (hidden, *rest), named = seen[0]

    def step() -> None:
        for _ in range(_MICROBATCHES):
            args = [_with_empty_cache(item) for item in rest]
            kwargs = {key: _with_empty_cache(item) for key, item in named.items()}
            layer.forward(hidden.detach().requires_grad_(), *args, **kwargs)

    return step


def _with_empty_cache(item: Any) -> Any:
    from transformers import Cache, DynamicCache

    return DynamicCache() if isinstance(item, Cache) else item
