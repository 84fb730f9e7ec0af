"""Hugging Face's RoBERTa: state dicts.

The position embedding keeps its two rows for padding: give ``position_ids`` that start at
``padding_idx + 1``, as RoBERTa does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_smp.nn.huggingface.bert import bert_table

__all__ = [
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]

_TABLE = bert_table("roberta.")


def translate_hf_state_dict_to_smdistributed_roberta(
    state_dict: Mapping[str, Any],
) -> dict[str, Any]:
    """Translate the state dict of a RobertaModel, or of a model with one inside.

    Heads have no counterpart here and keep their names.
    """
    return _TABLE.to_ours(state_dict)


def translate_state_dict_to_hf_roberta(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate to the state dict of a model with a RobertaModel inside.

    Args:
        state_dict: whole, of a `DistributedTransformerLMHead`.
        max_seq_len: RoBERTa stores no masks, so nothing depends on it.

    Raises:
        CheckpointError: a part of a layer is missing.
    """
    return _TABLE.to_theirs(state_dict)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
