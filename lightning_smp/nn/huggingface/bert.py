"""Hugging Face's BERT: state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_smp.nn.huggingface.translating import Table, Weight, both

__all__ = [
    "bert_table",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
    "translate_state_dict_to_smdistributed",
]


def bert_table(prefix: str) -> Table:
    """Return the table of BERT and models built like it.

    Args:
        prefix: of the bare model's names in a model with a head.
    """
    theirs, ours = f"{prefix}encoder.layer.#.", "transformer.seq_layers.#."
    embeddings = f"{prefix}embeddings."
    cross = tuple(
        weight
        for name in ("query", "key", "value")
        for weight in both(f"{theirs}crossattention.self.{name}", f"{ours}cross_attention.{name}")
    )
    attention = tuple(
        weight
        for name in ("query", "key", "value")
        for weight in both(f"{theirs}attention.self.{name}", f"{ours}attention.{name}")
    )
    return Table(
        prefix=prefix,
        weights=(
            Weight(f"{embeddings}word_embeddings.weight", ("word_embedding.weight",)),
            Weight(f"{embeddings}position_embeddings.weight", ("position_embedding.weight",)),
            Weight(f"{embeddings}token_type_embeddings.weight", ("token_type_embedding.weight",)),
            *both(f"{embeddings}LayerNorm", "embedding_output.layernorm"),
            *attention,
            *both(f"{theirs}attention.output.dense", f"{ours}attention.dense"),
            *both(f"{theirs}attention.output.LayerNorm", f"{ours}attention.layernorm"),
            *cross,
            *both(f"{theirs}crossattention.output.dense", f"{ours}cross_attention.dense"),
            *both(f"{theirs}crossattention.output.LayerNorm", f"{ours}cross_attention.layernorm"),
            *both(f"{theirs}intermediate.dense", f"{ours}output.dense1"),
            *both(f"{theirs}output.dense", f"{ours}output.dense2"),
            *both(f"{theirs}output.LayerNorm", f"{ours}output.layernorm"),
        ),
        dropped=(f"{embeddings}position_ids", f"{embeddings}token_type_ids"),
    )


_TABLE = bert_table("bert.")


def translate_hf_state_dict_to_smdistributed_bert(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the state dict of a BertModel, or of a model with one inside.

    Heads (pooler, ``cls``) have no counterpart here and keep their names.
    """
    return _TABLE.to_ours(state_dict)


def translate_state_dict_to_hf_bert(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate to the state dict of a model with a BertModel inside.

    Args:
        state_dict: whole, of a `DistributedTransformerLMHead`.
        max_seq_len: BERT stores no masks, so nothing depends on it.

    Raises:
        CheckpointError: a part of a layer is missing.
    """
    return _TABLE.to_theirs(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_bert
