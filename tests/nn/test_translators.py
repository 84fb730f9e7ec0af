"""State dicts of Hugging Face's models, translated: nothing is lost, and outputs are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smp import nn as snn
from lightning_smp.errors import CheckpointError
from lightning_smp.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

_TO_OURS: dict[str, Any] = {
    "gpt2": gpt2.translate_hf_state_dict_to_smdistributed_gpt2,
    "bert": bert.translate_hf_state_dict_to_smdistributed_bert,
    "roberta": roberta.translate_hf_state_dict_to_smdistributed_roberta,
    "gptj": gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj,
    "gptneo": gptneo.translate_hf_state_dict_to_smdistributed_gptneo,
}
_TO_THEIRS: dict[str, Any] = {
    "gpt2": gpt2.translate_state_dict_to_hf_gpt2,
    "bert": bert.translate_state_dict_to_hf_bert,
    "roberta": roberta.translate_state_dict_to_hf_roberta,
    "gptj": gptj.translate_state_dict_to_hf_gptj,
    "gptneo": gptneo.translate_state_dict_to_hf_gptneo,
}
_ALIASES = {
    gpt2: "translate_hf_state_dict_to_smdistributed translate_state_dict_to_smdistributed "
    "translate_hf_block_state_dict_to_smdistributed translate_layer_state_dict_to_hf_gpt2_block "
    "get_hf_gpt2_transformer_layer_hooks",
    roberta: "translate_state_dict_to_smdistributed translate_state_dict_to_hf_roberta",
    gptj: "translate_hf_state_dict_to_smdistributed_gptj "
    "translate_hf_gptj_state_dict_to_smdistributed",
}
_SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24,
    "vocab_size": 33, "max_position_embeddings": 12, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_OURS: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16,
    "intermediate_size": 24, "vocab_size": 33, "num_positions": 12, "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}  # fmt: skip
_CAUSAL: dict[str, Any] = {
    **_OURS, "activation": "gelu_new", "causal_mask_size": 12, "pre_layernorm": True,
    "post_layernorm": False,
}  # fmt: skip


def _gpt2_config() -> Any:
    import transformers as t

    return t.GPT2Config(
        vocab_size=33, n_positions=12, n_embd=16, n_layer=2, n_head=4, n_inner=24, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _theirs(name: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if name == "gpt2":
        model: Any = t.GPT2LMHeadModel(_gpt2_config())
    elif name == "bert":
        model = t.BertForMaskedLM(t.BertConfig(**_SIZES))
    elif name == "roberta":
        model = t.RobertaForMaskedLM(t.RobertaConfig(**_SIZES))
    elif name == "gptj":
        model = t.GPTJForCausalLM(
            t.GPTJConfig(
                vocab_size=33, n_positions=12, n_embd=16, n_layer=2, n_head=4, rotary_dim=4
            )
        )
    else:
        model = t.GPTNeoForCausalLM(
            t.GPTNeoConfig(
                vocab_size=33, max_position_embeddings=12, hidden_size=16, num_layers=2,
                num_heads=4, intermediate_size=24, attention_types=[[["global"], 2]],
                resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
            )
        )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def _ids() -> Tensor:
    return torch.randint(2, 33, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", _TO_OURS)
def test_nothing_is_lost_there_and_back(name: str) -> None:
    theirs = _theirs(name).state_dict()
    ours = _TO_OURS[name](theirs)
    back = _TO_THEIRS[name](ours)
    assert back.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(back[key], value), key
    assert any(key.startswith("transformer.seq_layers.1.attention.query") for key in ours)


@pytest.mark.parametrize(("name", "options"), [
    ("gpt2", {}), ("gptneo", {"scale_attention_scores": False}),
])  # fmt: skip
def test_causal_models_give_equal_outputs(name: str, options: dict[str, Any]) -> None:
    model = _theirs(name)
    ours = snn.DistributedTransformerLMHead(**_CAUSAL, **options).eval()
    ours.load_state_dict(_TO_OURS[name](model.state_dict()))
    ids = _ids()
    wanted = model(ids, labels=ids)
    loss, logits = ours((ids, None, None, None, ids))
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_bidirectional_models_give_equal_outputs(name: str) -> None:
    model = _theirs(name)
    bare: Any = getattr(model, name)
    types = bare.config.type_vocab_size
    epsilon = bare.config.layer_norm_eps
    ours = snn.DistributedTransformerLMHead(
        **_OURS, num_token_types=types, add_lm_head=False, layernorm_epsilon=epsilon
    ).eval()
    ours.load_state_dict(_TO_OURS[name](bare.state_dict()))
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    token_types = torch.zeros_like(ids)
    positions = torch.arange(9)[None] + (2 if name == "roberta" else 0)
    wanted = bare(
        ids, attention_mask=mask, token_type_ids=token_types, position_ids=positions
    ).last_hidden_state
    found = ours((ids, 1 - mask, token_types, positions, None))
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


def test_a_block_becomes_a_layer_by_the_hooks() -> None:
    model: Any = _theirs("gpt2")
    block = model.transformer.h[1]
    init, forward, returned = gpt2.get_hf_gpt2_transformer_layer_hooks()
    args, kwargs = init(_gpt2_config(), layer_idx=1)
    layer = snn.DistributedTransformerLayer(*args, **kwargs).eval()
    state = gpt2.translate_hf_block_state_dict_to_smdistributed(block.state_dict())
    layer.load_state_dict(state)
    hidden = torch.randn(3, 9, 16)
    mask = torch.ones(3, 1, 9, 9).tril().bool()
    mask[0, :, :, 4] = False
    mask[0, :, 4, 4] = True
    args, kwargs = forward(hidden, attention_mask=mask, use_cache=False)
    found = returned(layer(*args, **kwargs))
    torch.testing.assert_close(found, block(hidden, attention_mask=mask), rtol=1e-4, atol=1e-5)
    back = gpt2.translate_layer_state_dict_to_hf_gpt2_block(layer.state_dict())
    block.load_state_dict(back)


def test_masks_are_added_for_old_versions_and_dropped_again() -> None:
    ours = _TO_OURS["gpt2"](_theirs("gpt2").state_dict())
    theirs = gpt2.translate_state_dict_to_hf_gpt2(ours, max_seq_len=5)
    assert theirs["transformer.h.1.attn.bias"].shape == (1, 1, 5, 5)
    assert _TO_OURS["gpt2"](theirs).keys() == ours.keys()


def test_a_bare_model_translates_like_one_with_a_head() -> None:
    model: Any = _theirs("gpt2")
    whole, bare = (
        _TO_OURS["gpt2"](model.state_dict()),
        _TO_OURS["gpt2"](model.transformer.state_dict()),
    )
    assert bare.keys() == whole.keys() - {"lm_head.weight"}


def test_what_cannot_be_translated_is_refused() -> None:
    ours = _TO_OURS["gpt2"](_theirs("gpt2").state_dict())
    del ours["transformer.seq_layers.0.attention.key.weight"]
    with pytest.raises(CheckpointError, match=r"seq_layers\.0\.attention\.key\.weight"):
        _TO_THEIRS["gpt2"](ours)
    ours = _TO_OURS["gptneo"](_theirs("gptneo").state_dict())
    ours["transformer.seq_layers.0.attention.key.bias"] += 1.0
    with pytest.raises(CheckpointError, match="is not zero"):
        _TO_THEIRS["gptneo"](ours)


def test_all_published_names_exist() -> None:
    for module, names in _ALIASES.items():
        for name in names.split():
            assert callable(getattr(module, name))
