"""Language models in plain PyTorch: tied and untied heads, dropout, changing lengths, padding."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.case import SEQUENCE, VOCABULARY, Case, Samples, Trainable, case, tokens

__all__ = ["CASES"]

WIDTH = 16
Head = Literal["untied", "shared", "functional"]


class Attention(nn.Module):
    """A pre-norm block: causal self-attention and an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, S, WIDTH] after attention over earlier positions and the MLP."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


class GPT(Trainable):
    """A decoder; the head has its own weight, shares the embedding's, or calls F.linear with it."""

    def __init__(self, head: Head, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(4 * SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Attention(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.rate = dropout
        if head != "functional":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if head == "shared":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, S, VOCABULARY]."""
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        if self.rate > 0:
            x = F.dropout(x, self.rate, self.training)
        for layer in self.blocks:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else F.linear(x, self.embed.weight)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        ids = batch["input_ids"]
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class TokenMean(GPT):
    """A mean over tokens that are not padding: exact when the step also returns ``loss_weight``."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        ids, mask = batch["input_ids"], batch["attention_mask"][:, 1:]
        losses = F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        weight = mask.sum()
        return {"loss": (losses * mask).sum() / weight, "loss_weight": weight}


def changing_lengths() -> Samples:
    """Return token samples whose length is constant over 8 samples, so that batches can stack."""
    samples = tokens().samples
    for index, sample in enumerate(samples):
        length = SEQUENCE - (index // 8) % 3
        sample["input_ids"] = sample["input_ids"][:length]
    return Samples(samples)


def padded_tokens() -> Samples:
    """Return token samples with an attention mask of a different length each."""
    samples = tokens().samples
    for index, sample in enumerate(samples):
        mask = torch.ones(SEQUENCE, dtype=torch.long)
        mask[SEQUENCE - index % 4 :] = 0
        sample["attention_mask"] = mask
    return Samples(samples)


CASES: tuple[Case, ...] = (
    case("gpt_untied", lambda: GPT("untied"), tokens),
    case("gpt_tied_parameter", lambda: GPT("shared"), tokens),
    case("gpt_tied_functional", lambda: GPT("functional"), tokens),
    case("gpt_dropout", lambda: GPT("shared", dropout=0.2), tokens, noise="inside"),
    case("changing_lengths", lambda: GPT("shared"), changing_lengths),
    case(
        "token_mean",
        lambda: TokenMean("shared"),
        padded_tokens,
        compares_losses=False,  # a rank may report its own tokens' mean
    ),
)
