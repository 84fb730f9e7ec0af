"""Models that the equality tests train, each built alike on one device and in a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lightning_smp as smp
from lightning_smp import nn as snn

__all__ = ["MODELS", "Data", "Model"]

NUM_TOKENS, LENGTH, HIDDEN = 23, 6, 12


class Perceptron(nn.Module):
    """Linear layers and an embedding that are marked, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN)
            self.inner = nn.Sequential(nn.Linear(HIDDEN, 15), nn.GELU(), nn.Linear(15, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        self.hidden = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        smp.set_tensor_parallelism(self.hidden)
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.norm(x + self.inner(x))
        return self.head(x + self.hidden(x))


class Block(nn.Module):
    """A transformer block as anybody would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Plain blocks with everything marked but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN)
        self.first = Block()
        with smp.tensor_parallelism():
            self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(self.embedding(ids))))


class LMHead(nn.Module):
    """SMP's own transformer, made before the run has started."""

    def __init__(self) -> None:
        super().__init__()
        self.model = snn.DistributedTransformerLMHead(
            3, 4, 3, HIDDEN, 20, NUM_TOKENS, LENGTH, attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0, causal_mask_size=LENGTH, pre_layernorm=True,
            post_layernorm=False, use_normal_initialization=True, initializer_range=0.2,
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model((ids, None, None, None, ids))[0]
        return loss


class Untied(nn.Module):
    """A stack of SMP's layers between plain modules, with a mask, and both layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN)
        self.stack = snn.DistributedTransformer(
            2, 4, 3, HIDDEN, 20, 0.0, 0.0, pre_layernorm=True, post_layernorm=True
        )
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids % 5 == 0)[:, None, None, :].double() * -30.0
        return self.head(self.stack((self.embedding(ids), mask))[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "transformer": Transformer,
    "lm_head": LMHead,
    "untied": Untied,
}


class Model(pl.LightningModule):
    """Trains one of the models in float64, with momentum and two groups by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.name = name
        self.net = MODELS[name]().double()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids = batch[0]
        output = self.net(ids)
        if self.name == "lm_head":
            return output
        return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


class Data(pl.LightningDataModule):
    """Token sequences in order, dealt to the shares of the data."""

    def __init__(self, batch_size: int, num_samples: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(NUM_TOKENS, (num_samples, LENGTH), generator=generator)
        self.data: Dataset[Any] = TensorDataset(ids)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(self.data, shuffle=False, **share) if share else None
        return DataLoader(self.data, batch_size=self.batch_size, sampler=sampler)
