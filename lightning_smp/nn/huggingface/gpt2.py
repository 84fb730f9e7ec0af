"""Hugging Face's GPT-2: state dicts, and hooks that let its blocks become distributed layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lightning_smp.errors import UnsupportedError
from lightning_smp.nn.huggingface.translating import Table, Weight, both

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
    "translate_state_dict_to_smdistributed",
]

_THEIRS: Final = "transformer.h.#."
_OURS: Final = "transformer.seq_layers.#."
_QKV: Final = ("query", "key", "value")


def _fused(theirs: str, attention: str, names: tuple[str, ...]) -> tuple[Weight, Weight]:
    return (
        Weight(f"{theirs}.weight", tuple(f"{attention}.{n}.weight" for n in names), True),
        Weight(f"{theirs}.bias", tuple(f"{attention}.{n}.bias" for n in names)),
    )


_TABLE: Final = Table(
    prefix="transformer.",
    weights=(
        Weight("transformer.wte.weight", ("word_embedding.weight",)),
        Weight("transformer.wpe.weight", ("position_embedding.weight",)),
        *both("transformer.ln_f", "layernorm"),
        Weight("lm_head.weight", ("lm_head.weight",)),
        *_fused(f"{_THEIRS}attn.c_attn", f"{_OURS}attention", _QKV),
        *both(f"{_THEIRS}attn.c_proj", f"{_OURS}attention.dense", is_transposed=True),
        *both(f"{_THEIRS}ln_1", f"{_OURS}attention.pre_layernorm"),
        *_fused(f"{_THEIRS}crossattention.q_attn", f"{_OURS}cross_attention", ("query",)),
        *_fused(f"{_THEIRS}crossattention.c_attn", f"{_OURS}cross_attention", ("key", "value")),
        *both(
            f"{_THEIRS}crossattention.c_proj", f"{_OURS}cross_attention.dense", is_transposed=True
        ),
        *both(f"{_THEIRS}ln_cross_attn", f"{_OURS}cross_attention.pre_layernorm"),
        *both(f"{_THEIRS}mlp.c_fc", f"{_OURS}output.dense1", is_transposed=True),
        *both(f"{_THEIRS}mlp.c_proj", f"{_OURS}output.dense2", is_transposed=True),
        *both(f"{_THEIRS}ln_2", f"{_OURS}output.pre_layernorm"),
    ),
    dropped=(f"{_THEIRS}attn.bias", f"{_THEIRS}attn.masked_bias"),
)


def translate_hf_state_dict_to_smdistributed_gpt2(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the state dict of a GPT2Model or GPT2LMHeadModel."""
    return _TABLE.to_ours(state_dict)


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate to the state dict of a GPT2LMHeadModel.

    Args:
        state_dict: whole, of a `DistributedTransformerLMHead`.
        max_seq_len: with it, the causal masks are added that GPT-2 kept in its state dict up to
            transformers 4.30; without, they are left out.

    Raises:
        CheckpointError: a part of a layer is missing.
    """
    result = _TABLE.to_theirs(state_dict)
    if max_seq_len is not None:
        shape = (max_seq_len, max_seq_len)
        mask = torch.ones(shape, dtype=torch.uint8).tril()[None, None]
        layers = [n.removesuffix("ln_1.weight") for n in result if n.endswith(".ln_1.weight")]
        for layer in layers:
            result[f"{layer}attn.bias"] = mask
            result[f"{layer}attn.masked_bias"] = torch.tensor(-1e4)
    return result


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: Mapping[str, Any],
) -> dict[str, Any]:
    """Translate the state dict of a GPT2Block to that of a `DistributedTransformerLayer`."""
    theirs, ours = _THEIRS.replace("#", "0"), _OURS.replace("#", "0")
    found = _TABLE.to_ours({theirs + name: value for name, value in state_dict.items()})
    return {name.removeprefix(ours): value for name, value in found.items()}


def translate_layer_state_dict_to_hf_gpt2_block(
    state_dict: Mapping[str, Any], max_seq_len: int | None = None
) -> dict[str, Any]:
    """Translate the state dict of a `DistributedTransformerLayer` to that of a GPT2Block."""
    theirs, ours = _THEIRS.replace("#", "0"), _OURS.replace("#", "0")
    named = {ours + name: value for name, value in state_dict.items()}
    found = translate_state_dict_to_hf_gpt2(named, max_seq_len)
    return {name.removeprefix(theirs): value for name, value in found.items()}


def get_hf_gpt2_transformer_layer_hooks() -> tuple[
    Callable[..., Any], Callable[..., Any], Callable[..., Any]
]:
    """Return the hooks (init, forward, return) that make a GPT2Block a distributed layer.

    To be given to ``smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer,
    *hooks)``.
    """
    return _init_hook, _forward_hook, _return_hook


def _init_hook(config: Any, layer_idx: int | None = None) -> tuple[tuple[()], dict[str, Any]]:
    inner = config.n_inner if config.n_inner is not None else 4 * config.hidden_size
    return (), {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": inner,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "add_cross_attention": bool(config.add_cross_attention),
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "layer_idx": layer_idx or 0,
    }


def _forward_hook(
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a distributed layer; its cache stays empty, so it cannot generate."""
    if cache is not None and cache.get_seq_length():
        raise UnsupportedError(
            "A distributed GPT-2 layer keeps no keys and values of earlier tokens: call the model "
            "with use_cache=False, or generate with the model as it was."
        )
    mask = _added(attention_mask, hidden_states)
    if encoder_hidden_states is None:
        return ((hidden_states, mask),), {}
    cross = _added(encoder_attention_mask, hidden_states)
    return ((hidden_states, encoder_hidden_states, mask, cross),), {}


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask as it is added to scores."""
    if mask is None or mask.is_floating_point():
        return mask
    lowest = torch.finfo(like.dtype).min
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(
        ~mask.bool(), lowest
    )


def _return_hook(output: tuple[Any, ...]) -> Any:
    return output[0]


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
