"""Hugging Face's GPT-J: state dicts.

Only names: GPT-J turns queries and keys by their position and computes both halves of a layer from
one norm, which the layers here do not. ``tensor_parallel_modules="auto"`` splits GPT-J as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_smp.nn.huggingface.translating import Table, Weight, both

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed",
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
    "translate_state_dict_to_smdistributed",
]

_THEIRS: Final = "transformer.h.#."
_OURS: Final = "transformer.seq_layers.#."
_NAMES: Final = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "dense"}
_TABLE: Final = Table(
    prefix="transformer.",
    weights=(
        Weight("transformer.wte.weight", ("word_embedding.weight",)),
        *both("transformer.ln_f", "layernorm"),
        *both("lm_head", "lm_head"),
        *(
            Weight(f"{_THEIRS}attn.{theirs}.weight", (f"{_OURS}attention.{ours}.weight",))
            for theirs, ours in _NAMES.items()
        ),
        *both(f"{_THEIRS}ln_1", f"{_OURS}attention.pre_layernorm"),
        *both(f"{_THEIRS}mlp.fc_in", f"{_OURS}output.dense1"),
        *both(f"{_THEIRS}mlp.fc_out", f"{_OURS}output.dense2"),
    ),
    dropped=(f"{_THEIRS}attn.bias", f"{_THEIRS}attn.masked_bias", f"{_THEIRS}attn.embed_positions"),
)


def translate_hf_gptj_state_dict_to_smdistributed_gptj(
    state_dict: Mapping[str, Any],
) -> dict[str, Any]:
    """Translate the state dict of a GPTJModel or GPTJForCausalLM."""
    return _TABLE.to_ours(state_dict)


def translate_state_dict_to_hf_gptj(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate to the state dict of a GPTJForCausalLM.

    Args:
        state_dict: whole.
        max_seq_len: GPT-J's masks are not part of its state dict, so nothing depends on it.

    Raises:
        CheckpointError: a part of a layer is missing.
    """
    return _TABLE.to_theirs(state_dict)


translate_hf_state_dict_to_smdistributed_gptj = translate_hf_gptj_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_gptj_state_dict_to_smdistributed_gptj
translate_hf_state_dict_to_smdistributed = translate_hf_gptj_state_dict_to_smdistributed_gptj
translate_state_dict_to_smdistributed = translate_hf_gptj_state_dict_to_smdistributed_gptj
