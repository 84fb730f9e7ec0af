"""Translators between Hugging Face's models and the distributed ones here, a module per type."""

from lightning_smp.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
