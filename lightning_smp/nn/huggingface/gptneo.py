"""Hugging Face's GPT-Neo: state dicts.

Its queries, keys and values have no bias; here they have one, which is zero. Its scores are not
scaled: build layers with ``scale_attention_scores=False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from lightning_smp.nn.huggingface.translating import Table, Weight, both

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptneo",
    "translate_state_dict_to_hf_gptneo",
    "translate_state_dict_to_smdistributed",
]

_THEIRS: Final = "transformer.h.#."
_OURS: Final = "transformer.seq_layers.#."
_QKV: Final = ("query", "key", "value")
_TABLE: Final = Table(
    prefix="transformer.",
    weights=(
        Weight("transformer.wte.weight", ("word_embedding.weight",)),
        Weight("transformer.wpe.weight", ("position_embedding.weight",)),
        *both("transformer.ln_f", "layernorm"),
        Weight("lm_head.weight", ("lm_head.weight",)),
        *(
            Weight(
                f"{_THEIRS}attn.attention.{name[0]}_proj.weight",
                (f"{_OURS}attention.{name}.weight",),
            )
            for name in _QKV
        ),
        *both(f"{_THEIRS}attn.attention.out_proj", f"{_OURS}attention.dense"),
        *both(f"{_THEIRS}ln_1", f"{_OURS}attention.pre_layernorm"),
        *both(f"{_THEIRS}mlp.c_fc", f"{_OURS}output.dense1"),
        *both(f"{_THEIRS}mlp.c_proj", f"{_OURS}output.dense2"),
        *both(f"{_THEIRS}ln_2", f"{_OURS}output.pre_layernorm"),
    ),
    zeros=tuple(
        (f"{_OURS}attention.{name}.bias", f"{_OURS}attention.{name}.weight") for name in _QKV
    ),
    dropped=(f"{_THEIRS}attn.attention.bias", f"{_THEIRS}attn.attention.masked_bias"),
)


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: Mapping[str, Any],
) -> dict[str, Any]:
    """Translate the state dict of a GPTNeoModel or GPTNeoForCausalLM."""
    return _TABLE.to_ours(state_dict)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate to the state dict of a GPTNeoForCausalLM.

    Args:
        state_dict: whole, of a `DistributedTransformerLMHead`.
        max_seq_len: with it, the causal masks are added that GPT-Neo kept in its state dict up to
            transformers 4.30 (for layers of global attention).

    Raises:
        CheckpointError: a part of a layer is missing, or a bias of queries, keys or values is not
            zero.
    """
    result = _TABLE.to_theirs(state_dict)
    if max_seq_len is not None:
        shape = (max_seq_len, max_seq_len)
        mask = torch.ones(shape, dtype=torch.uint8).tril()[None, None]
        layers = [n.removesuffix("ln_1.weight") for n in result if n.endswith(".ln_1.weight")]
        for layer in layers:
            result[f"{layer}attn.attention.bias"] = mask
            result[f"{layer}attn.attention.masked_bias"] = torch.tensor(-1e9)
    return result


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
