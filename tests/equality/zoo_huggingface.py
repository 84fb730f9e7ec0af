"""Hugging Face models from tiny configurations, untouched: their own caches and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.equality.case import (
    NUM_CLASSES,
    SEQUENCE,
    VOCABULARY,
    Case,
    Samples,
    Trainable,
    case,
    tokens,
)
from tests.equality.zoo_text import padded_tokens

__all__ = ["CASES"]

# Parts of these models compute in float32 whatever their dtype: norms, rotary tables, losses.
RTOL = 1e-5


def gpt2(**options: Any) -> GPT2LMHeadModel:
    """Return a tiny GPT-2 without dropout, unless asked for."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **special, **no_dropout, **options}))


def llama() -> LlamaForCausalLM:
    """Return a tiny Llama of four layers with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def t5() -> T5ForConditionalGeneration:
    """Return a tiny T5, whose encoder, decoder and head share one embedding."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


def bert() -> BertForSequenceClassification:
    """Return a tiny BERT with a classification head on its pooler."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=NUM_CLASSES,
    )
    return BertForSequenceClassification(config)


class Whole(Trainable):
    """Hands the batch to the model and takes the loss that the model computes."""

    def __init__(self, build: Callable[[], PreTrainedModel]) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss


class LanguageModel(Trainable):
    """Computes the next-token loss outside of the model, in the model's precision."""

    def __init__(self, build: Callable[[], PreTrainedModel], **options: Any) -> None:
        super().__init__()
        self.model = build()
        self.options = options

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, **self.options)
        logits, targets = output.logits[:, :-1], batch["input_ids"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if output.hidden_states is not None:
            loss = loss + 0.01 * sum(h.pow(2).mean() for h in output.hidden_states)
        return loss


class Checkpointed(LanguageModel):
    """Gradient checkpointing, with the given flavour or the default one."""

    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__(gpt2)
        flavour = None if use_reentrant is None else {"use_reentrant": use_reentrant}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=flavour)


def labelled() -> Samples:
    """Return token samples that are their own labels."""
    return Samples([{**sample, "labels": sample["input_ids"]} for sample in tokens().samples])


def translations() -> Samples:
    """Return pairs of a source and a shorter target."""
    samples = tokens().samples
    return Samples(
        [{**sample, "labels": sample["input_ids"].flip(0)[: SEQUENCE - 2]} for sample in samples]
    )


def classified() -> Samples:
    """Return padded token samples with a class."""
    samples = padded_tokens().samples
    return Samples([{**s, "labels": torch.tensor(i % NUM_CLASSES)} for i, s in enumerate(samples)])


CASES: tuple[Case, ...] = (
    case("hf_gpt2", lambda: Whole(gpt2), labelled, rtol=RTOL),
    case("hf_gpt2_logits", lambda: LanguageModel(gpt2), tokens, rtol=RTOL),
    case(
        "hf_gpt2_untied",
        lambda: LanguageModel(lambda: gpt2(tie_word_embeddings=False)),
        tokens,
        rtol=RTOL,
    ),
    case("hf_gpt2_padded", lambda: LanguageModel(gpt2), padded_tokens, rtol=RTOL),
    case(
        "hf_gpt2_hidden_states",
        lambda: LanguageModel(gpt2, output_hidden_states=True),
        tokens,
        rtol=RTOL,
    ),
    case("hf_gpt2_checkpoint", lambda: Checkpointed(use_reentrant=None), tokens, rtol=RTOL),
    case(
        "hf_gpt2_checkpoint_reentrant",
        lambda: Checkpointed(use_reentrant=True),
        tokens,
        rtol=RTOL,
    ),
    case(
        "hf_gpt2_checkpoint_nonreentrant",
        lambda: Checkpointed(use_reentrant=False),
        tokens,
        rtol=RTOL,
    ),
    case(
        "hf_gpt2_dropout",
        lambda: LanguageModel(lambda: gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)),
        tokens,
        noise="inside",
        rtol=RTOL,
    ),
    case("hf_llama", lambda: Whole(llama), labelled, rtol=RTOL),
    case("hf_llama_padded", lambda: LanguageModel(llama), padded_tokens, rtol=RTOL),
    case("hf_t5", lambda: Whole(t5), translations, rtol=RTOL),
    case("hf_bert", lambda: Whole(bert), classified, rtol=RTOL),
)
