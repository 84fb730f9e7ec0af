"""Hugging Face models of tiny configurations, and a user's own module, for equality tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

__all__ = ["CASES", "Case", "Samples", "Trained"]

VOCABULARY, LENGTH = 33, 7  # 33: no number of ranks divides it


@dataclass(frozen=True)
class Case:
    """A model and how it is split.

    Attributes:
        make: makes the model; the default dtype is float64.
        rtol: 1e-10 where the model computes in float64; some cast their logits to float32.
        modules: the strategy's ``tensor_parallel_modules``.
    """

    make: Callable[[], nn.Module]
    rtol: float = 1e-10
    modules: Any = "auto"
    keywords: tuple[str, ...] = ("input_ids", "attention_mask", "labels")


def _gpt2() -> nn.Module:
    import transformers as t

    return t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=22,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )  # fmt: skip


_COMMON = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 22,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert() -> nn.Module:
    import transformers as t

    config = t.BertConfig(
        **_COMMON, **_NO_DROPOUT, vocab_size=VOCABULARY, max_position_embeddings=16
    )
    return t.BertForMaskedLM(config)


def _llama() -> nn.Module:
    import transformers as t

    return t.LlamaForCausalLM(t.LlamaConfig(**_COMMON, vocab_size=VOCABULARY))


def _checkpointed() -> nn.Module:
    model: Any = _llama()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def _t5() -> nn.Module:
    import transformers as t

    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=22, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    import transformers as t

    config = t.ViTConfig(**_COMMON, **_NO_DROPOUT, image_size=8, patch_size=4, num_labels=5)
    return t.ViTForImageClassification(config)


def _qwen3_moe() -> nn.Module:
    import transformers as t

    return t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(
            **_COMMON, vocab_size=VOCABULARY, head_dim=4, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=6, experts_implementation="eager", tie_word_embeddings=True,
        )
    )  # fmt: skip


def _granite_swa() -> nn.Module:
    import transformers as t

    config = t.GraniteSWAConfig(
        **_COMMON, vocab_size=VOCABULARY, num_key_value_heads=2, attn_implementation="eager"
    )
    model = t.GraniteSWAForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of a user's own, with one projection for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        parts = self.qkv(x).view(samples, length, 3, -1, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, -1))


class Own(nn.Module):
    """A language model of a user's own with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.attn = Attention()
        self.norm = nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 21), nn.Linear(21, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.emb(input_ids)
        x = x + self.attn(x)
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        logits = self.head(x)
        loss = F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


_OWN = {"*.attn": "block", "*.qkv": "column:3", "*.out": "row", "*.fc1": "column", "*.fc2": "row",
        "*.emb": "embedding", "*.head": "vocab"}  # fmt: skip
_TO_FLOAT32 = 2e-5

CASES = {
    "gpt2": Case(_gpt2, _TO_FLOAT32),
    "bert": Case(_bert),
    "llama": Case(_llama, _TO_FLOAT32),
    "checkpointed": Case(_checkpointed, _TO_FLOAT32),
    "t5": Case(_t5),
    "vit": Case(_vit, keywords=("pixel_values", "labels")),
    "qwen3_moe": Case(_qwen3_moe, _TO_FLOAT32),
    "granite_swa": Case(_granite_swa, _TO_FLOAT32),
    "own": Case(Own, modules=_OWN, keywords=("input_ids", "labels")),
}


class Trained(pl.LightningModule):
    """Trains one of the models, with momentum and two groups by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.case = CASES[name]
        torch.set_default_dtype(torch.float64)
        try:
            self.net = self.case.make().double()
        finally:
            torch.set_default_dtype(torch.float32)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {key: batch[key] for key in self.case.keywords}
        if "pixel_values" in inputs:
            inputs["labels"] = inputs["labels"][:, 0] % 5
        loss: Tensor = self.net(**inputs)["loss"]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
        others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


@dataclass
class _Named:
    """Rows of several tensors by name."""

    data: TensorDataset
    names: tuple[str, ...] = field(
        default=("input_ids", "attention_mask", "labels", "pixel_values")
    )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(self.names, self.data[index], strict=True))


class Samples(pl.LightningDataModule):
    """Sequences and images in order; every sixth sequence ends in padding."""

    def __init__(self, batch_size: int, num_samples: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(1, VOCABULARY, (num_samples, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[::6, 5:] = 0
        labels = torch.randint(1, VOCABULARY, ids.shape, generator=generator)
        pixels = torch.randn(num_samples, 3, 8, 8, generator=generator, dtype=torch.float64)
        self.data = _Named(TensorDataset(ids, mask, labels, pixels))

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs
        sampler: Any = DistributedSampler(self.data, shuffle=False, **share) if share else None  # type: ignore[arg-type]
        return DataLoader(self.data, batch_size=self.batch_size, sampler=sampler)  # type: ignore[arg-type]
