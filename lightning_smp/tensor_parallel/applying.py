"""Carries out a plan: turns a model's modules into split ones, in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_smp.tensor_parallel.adopting import adopt
from lightning_smp.tensor_parallel.blocks import GatheringBlock, SplitExperts
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.families import Family
from lightning_smp.tensor_parallel.logits import Vocabulary
from lightning_smp.tensor_parallel.masks import MaskWatch
from lightning_smp.tensor_parallel.plan import Block, Plan, Split, Style, input_dim
from lightning_smp.tensor_parallel.scope import EntryScope
from lightning_smp.tensor_parallel.sharded import ColumnWise, RowWise, SharedCopy, SummedGradient
from lightning_smp.tensor_parallel.vocabulary import (
    EmbeddingColumns,
    HeadBias,
    VocabularyEmbedding,
    VocabularyHead,
)

__all__ = ["apply_plan"]


def apply_plan(
    plan: Plan,
    tp: TensorParallel,
    *,
    masks: MaskWatch | None = None,
    family: Family | None = None,
) -> None:
    """Splits the modules of a plan. Not a collective.

    Args:
        plan: made for ``tp.size`` ranks.
        tp: the tensor group.
        masks: watches the calls of the model that the plan is for.
        family: what is particular to its attention blocks.
    """
    scopes = {name: EntryScope() for name in plan.blocks}
    for split in plan.splits.values():
        _apply_split(split, tp, scopes.get(split.block))
    for block in plan.blocks.values():
        _apply_block(block, tp, scopes[block.name], masks, family or Family())


def _apply_split(split: Split, tp: TensorParallel, scope: EntryScope | None) -> None:
    module, style, parts = split.module, split.rule.style, split.shardings
    common: dict[str, Any] = {"place": split.place, "scope": scope}
    if style in (Style.COLUMN, Style.COLUMN_JOINED):
        adopt(
            module, ColumnWise, tp, parts, **common, input_dim=input_dim(module),
            joins_output=style is Style.COLUMN_JOINED,
            **_sizes(module, parts["weight"].sizes[tp.rank], ("out_features", "nf")),
        )  # fmt: skip
    elif style in (Style.ROW, Style.ROW_WHOLE_INPUT):
        adopt(
            module, RowWise, tp, parts, **common, input_dim=input_dim(module),
            splits_input=style is Style.ROW_WHOLE_INPUT,
            **_sizes(module, parts["weight"].sizes[tp.rank], ("in_features", "nx")),
        )  # fmt: skip
    elif style is Style.VOCAB:
        sizes = parts["weight"].sizes
        adopt(
            module, VocabularyHead, tp, parts, input_dim=input_dim(module),
            vocabulary=Vocabulary(tp, sizes, split.name),
            **_sizes(module, sizes[tp.rank], ("out_features", "nf")),
        )  # fmt: skip
    elif style is Style.EXPERTS:
        adopt(module, SplitExperts, tp, parts)
    elif style is Style.SUMMED:
        names = [name for name, _ in module.named_parameters()]
        adopt(module, SummedGradient, tp, parts, scaled=names)
    elif style is Style.LATENT:
        adopt(module, SharedCopy, tp, parts, num_direct=split.rule.direct)
    else:
        _apply_embedding(split, tp)


def _apply_embedding(split: Split, tp: TensorParallel) -> None:
    module, style, parts = split.module, split.rule.style, split.shardings
    assert isinstance(module, nn.Embedding)
    sizes = parts["weight"].sizes
    if style is Style.EMBEDDING:
        padding = module.padding_idx
        local = None if padding is None else padding - sum(sizes[: tp.rank])
        is_here = local is not None and 0 <= local < sizes[tp.rank]
        adopt(
            module, VocabularyEmbedding, tp, parts,
            num_embeddings=sizes[tp.rank], padding_idx=local if is_here else None,
        )  # fmt: skip
        return
    behaviour = EmbeddingColumns if style is Style.EMBEDDING_COLUMNS else HeadBias
    adopt(module, behaviour, tp, parts, embedding_dim=sizes[tp.rank])


def _apply_block(
    block: Block, tp: TensorParallel, scope: EntryScope, masks: MaskWatch | None, family: Family
) -> None:
    if not block.is_attention:
        family = Family()
    module = block.module
    counts = {
        name: getattr(module, name) // tp.size for name in family.counts if hasattr(module, name)
    }
    adopt(
        module, GatheringBlock, tp, {}, scaled=block.whole if tp.gathers else (),
        path=block.name, place=block.place, ends_inside=block.ends_inside, scope=scope,
        is_attention=block.is_attention, masks=masks,
        sliced=(family.sliced_arguments, family.sliced_results), **counts,
    )  # fmt: skip


def _sizes(module: nn.Module, size: int, names: tuple[str, str]) -> dict[str, int]:
    return {name: size for name in names if hasattr(module, name)}
