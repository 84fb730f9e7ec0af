"""Host cost of placed execution where a rank owns 1 of many layers of a Hugging Face model.

Rank 1 owns the middle layer, rank 0 all the rest; rank 1 is measured. Its CPU time per microbatch
(forward and backward) minus the layer's maths, its messages and the model's own outer Python is
what placed execution costs. The outer Python is the same model with every unit replaced by a
function that returns a tensor made before.
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
from lightning_smp.partition import find_atoms

__all__ = ["placed_host_cost"]

_VOCABULARY, _WIDTH, _HEADS, _ROWS, _LENGTH = 64, 16, 2, 1, 8


class LanguageModel(pl.LightningModule):
    """A Hugging Face model, trained as its documentation says."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def placed_host_cost(
    rank: int, family: str, layers: int, microbatches: int, rounds: int
) -> dict[str, Any]:
    """Measures one model. Collective over the world."""
    torch.manual_seed(0)
    module = LanguageModel(_model(family, layers))
    owned = _layers_name(family) + f".{layers // 2}"
    batch = torch.randint(0, _VOCABULARY, (_ROWS * microbatches, _LENGTH))
    bare = deepcopy(module)
    outer = _outer_step(bare, batch, microbatches)
    maths = _layer_step(deepcopy(module), owned, batch[:_ROWS], microbatches)
    engine = split_module(module, batch[:_ROWS], {owned: 1}, rank=rank, pipeline="interleaved")
    contenders = {
        "smp": train_step(stepper_of(module, engine), batch, microbatches),
        "outer": outer,
        "maths": maths,
        "messages": _message_step(rank, microbatches),
    }
    for step in contenders.values():
        for _ in range(3):
            step()
    runs = alternate(contenders, microbatches=microbatches, rounds=rounds, repeats=1)
    return {name: [asdict(cost) for cost in costs] for name, costs in runs.items()}


def _model(family: str, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=layers,
                n_head=_HEADS,
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


def _outer_step(module: LanguageModel, batch: Tensor, microbatches: int) -> Callable[[], None]:
    """The step's Python without its units: each returns what it returned once."""
    pieces = batch.chunk(microbatches)
    atoms = find_atoms(module)
    kept: dict[int, Any] = {}

    def note(inner: nn.Module, _: Any, result: Any) -> None:
        kept[id(inner)] = result

    handles = [atom.module.register_forward_hook(note) for atom in atoms]
    with torch.no_grad():
        module.training_step(pieces[0], 0)
    for handle in handles:
        handle.remove()
    for atom in atoms:
        result = kept.get(id(atom.module))
        atom.module.forward = lambda *args, result=result, **kwargs: result

    def step() -> None:
        for piece in pieces:
            module.training_step(piece, 0)

    return step


def _layer_step(
    module: LanguageModel, owned: str, piece: Tensor, microbatches: int
) -> Callable[[], None]:
    """Forward and backward of the owned layer, with the operands that the model gives it."""
    layer = module.get_submodule(owned)
    seen: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        module.training_step(piece, 0)
    handle.remove()
    (hidden, *rest), named = seen[0]
    parameters = list(layer.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        for _ in range(microbatches):
            args = [_with_empty_cache(item) for item in rest]
            kwargs = {key: _with_empty_cache(item) for key, item in named.items()}
            out = layer(hidden.detach().requires_grad_(), *args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.backward(out, torch.ones_like(out))

    return step


def _with_empty_cache(item: Any) -> Any:
    from transformers import Cache, DynamicCache

    return DynamicCache() if isinstance(item, Cache) else item


def _message_step(rank: int, microbatches: int) -> Callable[[], None]:
    """Two hidden states and their gradients: one each way in the forward and in the backward."""
    group = dist.new_group([0, 1])
    payload = torch.randn(_ROWS, _LENGTH, _WIDTH)
    buffer = torch.empty_like(payload)

    def step() -> None:
        for _ in range(2 * microbatches):
            receive = dist.irecv(buffer, group=group, group_src=1 - rank)
            send = dist.isend(payload, group=group, group_dst=1 - rank)
            assert receive is not None
            assert send is not None
            send.wait()
            receive.wait()

    return step
