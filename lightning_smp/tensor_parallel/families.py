"""How models without a plan of their own are split, by Hugging Face's model type."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lightning_smp.tensor_parallel.plan import Style

__all__ = ["FAMILIES", "Family"]

_Rules = tuple[tuple[str, Style, int], ...]


@dataclass(frozen=True)
class Family:
    """What is particular to the models of one type.

    Attributes:
        rules: end of a module's dotted name, its style, and its fused blocks.
        counts: attributes of attention modules that count heads or channels, which a rank has a
            part of; their values are divided by the group's size.
        sliced_arguments: arguments of attention modules that hold a slice for each rank's heads.
        sliced_results: numbers of results that do.
        partners: (end of a block's name, what stands there in the name of its row-wise layer).
    """

    rules: _Rules = ()
    counts: tuple[str, ...] = ()
    sliced_arguments: frozenset[str] = frozenset()
    sliced_results: frozenset[int] = frozenset()
    partners: tuple[tuple[str, str], ...] = ()


def _bert() -> Family:
    attention = (".attention.self", ".crossattention.self")
    columns = tuple(
        (f"{path}.{name}", Style.COLUMN, 1)
        for path in attention
        for name in ("query", "key", "value")
    )
    return Family(
        rules=(
            *columns,
            (".attention.output.dense", Style.ROW, 1),
            (".crossattention.output.dense", Style.ROW, 1),
            (".intermediate.dense", Style.COLUMN, 1),
            (".output.dense", Style.ROW, 1),
        ),
        counts=("num_attention_heads", "all_head_size"),
        partners=(
            (".attention.self", ".attention.output.dense"),
            (".crossattention.self", ".crossattention.output.dense"),
            (".intermediate", ".output.dense"),
        ),
    )


_GPT2 = Family(
    rules=(
        ("attn.c_attn", Style.COLUMN, 3),
        ("crossattention.c_attn", Style.COLUMN, 2),
        ("crossattention.q_attn", Style.COLUMN, 1),
        ("attn.c_proj", Style.ROW, 1),
        ("crossattention.c_proj", Style.ROW, 1),
        (".mlp.c_fc", Style.COLUMN, 1),
        (".mlp.c_proj", Style.ROW, 1),
    ),
    counts=("num_heads", "split_size", "embed_dim"),
)
_GPT_NEO = Family(
    rules=(
        *((f".attention.{name}_proj", Style.COLUMN, 1) for name in "qkv"),
        (".attention.out_proj", Style.ROW, 1),
        (".mlp.c_fc", Style.COLUMN, 1),
        (".mlp.c_proj", Style.ROW, 1),
    ),
    counts=("num_heads", "embed_dim"),
)
_GPTJ = Family(
    rules=(
        *((f".attn.{name}_proj", Style.COLUMN, 1) for name in "qkv"),
        (".attn.out_proj", Style.ROW, 1),
        (".mlp.fc_in", Style.COLUMN, 1),
        (".mlp.fc_out", Style.ROW, 1),
    ),
    counts=("num_attention_heads", "embed_dim"),
)
_VIT = Family(
    rules=(
        *((f".attention.{name}_proj", Style.COLUMN, 1) for name in "qkv"),
        (".attention.o_proj", Style.ROW, 1),
        (".mlp.fc1", Style.COLUMN, 1),
        (".mlp.fc2", Style.ROW, 1),
    ),
    counts=("num_attention_heads",),
)
_T5 = Family(
    rules=(
        *(
            (f".{kind}Attention.{name}", Style.COLUMN, 1)
            for kind in ("Self", "EncDec")
            for name in "qkv"
        ),
        (".SelfAttention.o", Style.ROW, 1),
        (".EncDecAttention.o", Style.ROW, 1),
        (".SelfAttention.relative_attention_bias", Style.HEAD_BIAS, 1),
        (".DenseReluDense.wi", Style.COLUMN, 1),
        (".DenseReluDense.wi_0", Style.COLUMN, 1),
        (".DenseReluDense.wi_1", Style.COLUMN, 1),
        (".DenseReluDense.wo", Style.ROW, 1),
    ),
    counts=("n_heads", "inner_dim"),
    sliced_arguments=frozenset({"position_bias"}),
    sliced_results=frozenset({1}),
)

FAMILIES: Final = MappingProxyType(
    {
        "gpt2": _GPT2,
        "gpt_neo": _GPT_NEO,
        "gptj": _GPTJ,
        "bert": _bert(),
        "roberta": _bert(),
        "t5": _T5,
        "vit": _VIT,
    }
)
"""Model type -> family."""
