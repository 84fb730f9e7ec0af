"""A transformer from token numbers to logits, split over a tensor group from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp.errors import UnsupportedError
from lightning_smp.nn.functional import dropout
from lightning_smp.nn.layer_norm import layer_norm
from lightning_smp.nn.transformer import DistributedTransformer, Exit
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.layout import Layout
from lightning_smp.tensor_parallel.logits import Vocabulary, split_logits
from lightning_smp.tensor_parallel.module import DistributedModule
from lightning_smp.tensor_parallel.record import Sharding

__all__ = ["DistributedTransformerLMHead"]


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a transformer, and a head without bias that is tied to the word embedding.

    ``forward((input_ids, attention_mask, token_type_ids, position_ids, labels))``, or with cross
    attention ``forward((input_ids, attention_mask, token_type_ids, position_ids, cross_states,
    cross_mask, labels))``. All but input_ids [B, S] may be None. In the masks [B, S], 1 stands for
    masked, 0 for seen.

    Returns logits [B, S, V], or ``(loss, logits)`` with labels [B, S], where -100 counts for
    nothing; with causal attention the label of a position is the next token. Without a head, hidden
    states [B, S, H]. Each rank holds some of the vocabulary, and the loss never needs whole logits.

    The stack's output is normed with `pre_layernorm`, the embeddings are with `post_layernorm`.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        tp: TensorParallel | None = None,
        **layer_arguments: Any,
    ) -> None:
        """Arguments are those of `DistributedTransformer` and the sizes of the embeddings.

        Args:
            num_layers: number of layers.
            num_attention_heads: of all ranks together.
            attention_head_size: channels of a head.
            hidden_size: H.
            intermediate_size: inner channels of the feed-forward halves.
            vocab_size: V.
            num_positions: positions that have an embedding; 0 for none.
            attention_dropout_prob: of attention weights.
            hidden_dropout_prob: of each half's result, and of the embeddings.
            activation: of the feed-forward halves.
            layernorm_epsilon: of the layer norms.
            num_token_types: token types that have an embedding; 0 for none.
            causal_mask_size: longest sequence of causal attention; None: not causal.
            add_cross_attention: attend to other states in each layer.
            add_lm_head: end in logits.
            initializer_range: deviation of a normal distribution; embeddings always start with it.
            use_normal_initialization: start with that; else with torch's default.
            pre_layernorm: norm the inputs of the halves.
            post_layernorm: norm the sums with the residuals.
            tp: the tensor group; by default that of the run.
            layer_arguments: further arguments of the layers (`use_alibi` and so on).

        Raises:
            ConfigError: as of a layer.
        """
        super().__init__(tp=tp)
        layout = Layout(self.tp, hidden_size)
        self.layout = layout
        self.add_cross_attention = add_cross_attention
        self.is_causal = causal_mask_size is not None
        both = pre_layernorm and post_layernorm
        self.word_embedding = _Words(vocab_size, layout, initializer_range)
        self.position_embedding = _table(num_positions, layout, initializer_range)
        self.token_type_embedding = _table(num_token_types, layout, initializer_range)
        is_normed = post_layernorm and not both
        norm = layer_norm(layout, layernorm_epsilon) if is_normed else None
        self.embedding_output = _EmbeddingOutput(layout, norm, hidden_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size,
            attention_dropout_prob, hidden_dropout_prob, activation, layernorm_epsilon,
            initializer_range, use_normal_initialization, causal_mask_size, add_cross_attention,
            pre_layernorm, post_layernorm, tp=self.tp, is_inside=True, **layer_arguments,
        )  # fmt: skip
        is_normed = pre_layernorm and not both
        self.layernorm = layer_norm(layout, layernorm_epsilon) if is_normed else None
        self.lm_head = _Head(layout, self.word_embedding) if add_lm_head else None
        self.exit = None if add_lm_head else Exit(layout)

    def forward(self, inputs: Sequence[Tensor | None]) -> Any:
        """Return logits, loss and logits, or hidden states, of own samples. Collective over tp."""
        ids, mask, types, positions, *cross, labels = self._checked(inputs)
        assert ids is not None
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.word_embedding(self._everybodys(ids))
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(self._everybodys(positions, ids))
        if self.token_type_embedding is not None and types is not None:
            hidden = hidden + self.token_type_embedding(self._everybodys(types, ids))
        hidden = self.embedding_output(hidden)
        others = [self._additive(mask, ids)]
        if self.add_cross_attention:
            states, cross_mask = cross
            assert states is not None
            others = [self.layout.enter(states), *others, self._additive(cross_mask, ids)]
        hidden = self.transformer((hidden, *others))[0]
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.lm_head is None:
            assert self.exit is not None
            return self.exit(hidden)
        return self.lm_head(hidden, labels, self.is_causal)

    def _checked(self, inputs: Any) -> Sequence[Tensor | None]:
        wanted = 7 if self.add_cross_attention else 5
        if isinstance(inputs, (tuple, list)) and len(inputs) == wanted:
            return inputs
        raise UnsupportedError(
            "DistributedTransformerLMHead was called with "
            f"{len(inputs) if isinstance(inputs, (tuple, list)) else type(inputs).__name__}; it "
            "takes one tuple (input_ids, attention_mask, token_type_ids, position_ids, labels), "
            "with cross_states and cross_mask before labels where it has cross attention."
        )

    def _everybodys(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """Bring together what belongs to samples; what is the same for all samples stays."""
        if like is not None and x.shape[0] != like.shape[0]:
            return x
        return self.layout.everybody(x)

    def _additive(self, mask: Tensor | None, ids: Tensor) -> Tensor | None:
        """From a mask [B, S] of ones where masked to what is added to scores [B', 1, 1, S]."""
        if mask is None:
            return None
        dtype = self.word_embedding.weight.dtype
        lowest = torch.finfo(dtype).min
        return self._everybodys(mask, ids)[:, None, None, :].to(dtype) * lowest


class _Words(DistributedModule):
    """A word embedding of which each rank has some rows; gives the layout inside."""

    weight: nn.Parameter

    def __init__(self, vocab_size: int, layout: Layout, std: float) -> None:
        super().__init__(tp=layout.tp)
        self.layout = layout
        sharding = Sharding.split((vocab_size, layout.hidden_size), 0, self.tp.size)
        self.weight = self.add_split_parameter("weight", sharding)
        self.fill("weight", lambda full: full.normal_(0.0, std))

    def forward(self, ids: Tensor) -> Tensor:
        """From everybody's token numbers [B', S] to embeddings. Collective over tp."""
        sizes = self.shardings["weight"].sizes
        local = ids - sum(sizes[: self.tp.rank])
        own = sizes[self.tp.rank]
        if self.tp.size == 1:
            return F.embedding(local, self.weight)
        is_here = (local >= 0) & (local < own)
        found = F.embedding(local.clamp(0, own - 1), self.weight) * is_here[..., None]
        return self.layout.from_rows(found)


class _Table(DistributedModule):
    """A small embedding, of which each rank has the channels that it needs."""

    def __init__(self, num_embeddings: int, layout: Layout, std: float) -> None:
        super().__init__(tp=layout.tp)
        shape = (num_embeddings, layout.hidden_size)
        if layout.is_sliced:
            self.weight = self.add_split_parameter("weight", Sharding.split(shape, 1, self.tp.size))
        else:
            self.weight = nn.Parameter(torch.empty(shape))
            self.scaled_batch_parameters.add("weight")
        self.fill("weight", lambda full: full.normal_(0.0, std))

    def forward(self, indices: Tensor) -> Tensor:
        """From indices [B' or 1, S] to embeddings in the layout inside."""
        return F.embedding(indices, self.weight)


class _EmbeddingOutput(DistributedModule):
    """Layer norm and dropout of embeddings."""

    def __init__(self, layout: Layout, norm: nn.Module | None, p: float) -> None:
        super().__init__(tp=layout.tp)
        self.layout = layout
        self.layernorm = norm
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layernorm is None else self.layernorm(x)
        return dropout(self, x, self.dropout.p, sliced=self.layout.is_sliced)


class _Head(DistributedModule):
    """Logits of which each rank has some classes, and their loss."""

    weight: nn.Parameter

    def __init__(self, layout: Layout, words: _Words) -> None:
        super().__init__(tp=layout.tp)
        self.layout = layout
        self.weight = words.weight
        self.shardings["weight"] = words.shardings["weight"]
        self.vocabulary = Vocabulary(self.tp, self.shardings["weight"].sizes)

    def forward(self, hidden: Tensor, labels: Tensor | None, is_causal: bool) -> Any:
        """From the layout inside to (loss and) own logits [B, S, V]. Collective over tp."""
        logits = F.linear(self.layout.to_columns(hidden), self.weight)
        if self.tp.size > 1:
            ranks = self.tp.size if self.tp.gathers else 1
            logits = split_logits(logits.unflatten(0, (ranks, -1)), self.vocabulary)
        if labels is None:
            return logits
        shown, wanted = (logits[:, :-1], labels[:, 1:]) if is_causal else (logits, labels)
        loss = F.cross_entropy(shown.flatten(0, 1), wanted.flatten())
        return loss, logits


def _table(num_embeddings: int, layout: Layout, std: float) -> _Table | None:
    return _Table(num_embeddings, layout, std) if num_embeddings else None
