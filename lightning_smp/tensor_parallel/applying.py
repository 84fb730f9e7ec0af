"""Carries out a plan: turns a model's modules into split ones, in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_smp.tensor_parallel.adopting import adopt
from lightning_smp.tensor_parallel.blocks import GatheringBlock, SplitExperts
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.families import Family
from lightning_smp.tensor_parallel.logits import Vocabulary
from lightning_smp.tensor_parallel.plan import Block, Plan, Split, Style, input_dim
from lightning_smp.tensor_parallel.scope import EntryScope
from lightning_smp.tensor_parallel.sharded import ColumnWise, RowWise, SharedCopy, SummedGradient
from lightning_smp.tensor_parallel.vocabulary import (
    EmbeddingColumns,
    HeadBias,
    VocabularyEmbedding,
    VocabularyHead,
)

__all__ = ["apply_plan", "fresh_weights"]


def apply_plan(
    plan: Plan,
    tp: TensorParallel,
    *,
    family: Family | None = None,
) -> None:
    """Splits the modules of a plan. Not a collective.

    Args:
        plan: made for ``tp.size`` ranks.
        tp: the tensor group.
        family: what is particular to its attention blocks.
    """
    scopes = {name: EntryScope() for name in plan.blocks}
    for split in plan.splits.values():
        _apply_split(split, tp, scopes.get(split.block))
    for block in plan.blocks.values():
        _apply_block(block, tp, scopes[block.name], family or Family())


def fresh_weights(plan: Plan, initialize: Callable[[Tensor], object]) -> None:
    """Give the split parameters of a plan new values, from the present random state."""
    with torch.no_grad():
        held = [(split.module, split.shardings) for split in plan.splits.values()]
        held += [(block.module, block.own) for block in plan.blocks.values()]
        for module, shardings in held:
            for name in shardings:
                parameter = getattr(module, name)
                if parameter.dim() > 1:
                    initialize(parameter)
                else:
                    parameter.zero_()


def _apply_split(split: Split, tp: TensorParallel, scope: EntryScope | None) -> None:
    module, style, parts = split.module, split.rule.style, split.shardings
    linear = {"input_dim": input_dim(module), "place": split.place, "scope": scope}
    if style in (Style.COLUMN, Style.COLUMN_JOINED):
        outputs = _sizes(module, parts["weight"].sizes[tp.rank], ("out_features", "nf"))
        joins = {"joins_output": style is Style.COLUMN_JOINED}
        adopt(module, ColumnWise, tp, parts, {**linear, **joins, **outputs})
    elif style in (Style.ROW, Style.ROW_WHOLE_INPUT):
        inputs = _sizes(module, parts["weight"].sizes[tp.rank], ("in_features", "nx"))
        splits = {"splits_input": style is Style.ROW_WHOLE_INPUT}
        adopt(module, RowWise, tp, parts, {**linear, **splits, **inputs})
    elif style is Style.VOCAB:
        sizes = parts["weight"].sizes
        outputs = _sizes(module, sizes[tp.rank], ("out_features", "nf"))
        vocabulary = Vocabulary(tp, sizes, split.name)
        head = {"input_dim": linear["input_dim"], "vocabulary": vocabulary}
        adopt(module, VocabularyHead, tp, parts, {**head, **outputs})
    elif style is Style.EXPERTS:
        adopt(module, SplitExperts, tp, parts, {})
    elif style is Style.SUMMED:
        names = [name for name, _ in module.named_parameters()]
        adopt(module, SummedGradient, tp, parts, {}, scaled=names)
    elif style is Style.LATENT:
        adopt(module, SharedCopy, tp, parts, {"num_direct": split.rule.direct})
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
        rows = {"num_embeddings": sizes[tp.rank], "padding_idx": local if is_here else None}
        adopt(module, VocabularyEmbedding, tp, parts, rows)
        return
    behaviour = EmbeddingColumns if style is Style.EMBEDDING_COLUMNS else HeadBias
    adopt(module, behaviour, tp, parts, {"embedding_dim": sizes[tp.rank]})


def _apply_block(block: Block, tp: TensorParallel, scope: EntryScope, family: Family) -> None:
    if not block.is_attention:
        family = Family()
    module = block.module
    counts = {
        name: getattr(module, name) // tp.size for name in family.counts if hasattr(module, name)
    }
    attributes = {
        "path": block.name,
        "place": block.place,
        "ends_inside": block.ends_inside,
        "scope": scope,
        "is_attention": block.is_attention,
        "sliced": (family.sliced_arguments, family.sliced_results),
        **counts,
    }
    scaled = block.whole if tp.gathers else ()
    adopt(module, GatheringBlock, tp, block.own, attributes, scaled=scaled)


def _sizes(module: nn.Module, size: int, names: tuple[str, str]) -> dict[str, int]:
    return {name: size for name in names if hasattr(module, name)}
