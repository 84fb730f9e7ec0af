"""Dropout with tensor parallelism: one function, its own gradient, and the same in any pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_smp import SMPStrategy
from lightning_smp import nn as snn
from lightning_smp.tensor_parallel.context import TensorParallel
from lightning_smp.tensor_parallel.module import shardings_of
from lightning_smp.tensor_parallel.patterns import pattern_rule
from lightning_smp.tensor_parallel.pretrained import pretrained_rule
from lightning_smp.tensor_parallel.replace import Rule, distribute
from tests.support.devices import ACCELERATOR, needs_devices
from tests.support.launch import gloo_group, run_ranks
from tests.tensor_parallel.models import HIDDEN, LENGTH, NUM_TOKENS, Data
from tests.tensor_parallel.reduce import mean_gradients, own

_BATCH, _P = 12, 0.2


class Attention(nn.Module):
    """Attention that drops before, between and after its split layers, and norms inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(x), _P, self.training)
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = _P if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.out(F.dropout(y.transpose(1, 2).flatten(2), _P, self.training))
        return F.dropout(y, _P, self.training)


class Own(nn.Module):
    """A user's model: a block, a pair of layers without one, and dropout outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, HIDDEN)
        self.attn = Attention()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 15), nn.Linear(15, HIDDEN)
        self.drop = nn.Dropout(_P)
        self.head = nn.Linear(HIDDEN, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.emb(ids))
        x = x + self.attn(x)
        x = x + self.drop(self.fc2(self.drop(self.fc1(x).tanh())))
        return self.head(x)


class Smp(nn.Module):
    """SMP's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = snn.DistributedTransformerLMHead(
            2, 4, 3, HIDDEN, 20, NUM_TOKENS, LENGTH, attention_dropout_prob=_P,
            hidden_dropout_prob=_P, causal_mask_size=LENGTH, pre_layernorm=True,
            post_layernorm=False, use_normal_initialization=True, initializer_range=0.2,
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model((ids, None, None, None, None))
        return logits


class Gpt2(nn.Module):
    """Hugging Face's, tied."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as t

        config = t.GPT2Config(
            vocab_size=NUM_TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=22,
            resid_pdrop=_P, embd_pdrop=_P, attn_pdrop=_P, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = t.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits  # type: ignore[no-any-return]


_MODELS: dict[str, Callable[[], nn.Module]] = {"own": Own, "smp": Smp, "gpt2": Gpt2}
_TRAINED = [*product((False, True), ("own", "smp")), (False, "gpt2")]
_PATTERNS = {"*attn": "block", "*qkv": "column:3", "*out": "row", "*fc1": "column", "*fc2": "row"}


def _made(name: str) -> nn.Module:
    torch.manual_seed(11)
    return _MODELS[name]().double()


def _loss(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---- the gradient -----------------------------------------------------------------------------


def _derivative_rank(rank: int, world_size: int) -> None:
    ids = torch.randint(NUM_TOKENS, (_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    with gloo_group():
        cases = [*product(_MODELS, ("speed",)), ("smp", "memory")]
        for prescaled, (name, optimize) in product((False, True), cases):
            group = dist.group.WORLD
            assert group is not None
            tp = TensorParallel.over(group, prescaled=prescaled, optimize=optimize)  # type: ignore[arg-type]
            rules: dict[str, Rule] = {"own": pattern_rule(_PATTERNS), "gpt2": pretrained_rule()}
            net, _ = distribute(_made(name), tp, [rules[name]] if name in rules else ())
            _check_derivative(net, tp, ids, f"{name} {prescaled} {optimize}")


def _check_derivative(net: nn.Module, tp: TensorParallel, ids: Tensor, where: str) -> None:
    """The gradient is that of the loss of all ranks together, along a random direction."""

    def loss() -> Tensor:
        torch.manual_seed(5 if tp.prescaled else 5 + tp.rank)
        tp.streams.begin(7)
        return _loss(net, own(ids, tp))

    def total(value: Tensor) -> Tensor:
        everyone = [torch.empty_like(value) for _ in range(tp.size)]
        dist.all_gather(everyone, value, group=tp.group)
        if tp.prescaled:
            assert all(torch.equal(everyone[0], other) for other in everyone), where
        return torch.stack(everyone).mean()

    value = loss()
    value.backward()
    gradients = mean_gradients(net, tp)
    generator = torch.Generator().manual_seed(3)
    shardings, expected, steps = shardings_of(net), 0.0, {}
    for name, gradient in gradients.items():
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        expected += float((gradient * direction).sum())
        parts = shardings.get(name)
        steps[name] = direction if parts is None else parts.shard(direction, tp.rank)
    sides = []
    with torch.no_grad():
        for by in (1e-5, -2e-5):
            for name, parameter in net.named_parameters():
                parameter.add_(steps[name], alpha=by)
            sides.append(float(total(loss())))
    assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(expected, rel=1e-6), where


def test_the_gradient_is_that_of_what_the_ranks_computed() -> None:
    run_ranks(_derivative_rank, 2, timeout=100)


# ---- the pipeline -----------------------------------------------------------------------------


class _Model(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = _made(name)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return _loss(self.net, batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def _train_rank(rank: int, world_size: int, folder: Path) -> None:
    for prescaled, name in _TRAINED:
        strategy = SMPStrategy(
            tensor_parallel_degree=2, pipeline_parallel_degree=world_size // 2, microbatches=3,
            prescaled_batch=prescaled,
            tensor_parallel_modules=_PATTERNS if name == "own" else "auto",
        )  # fmt: skip
        model = _Model(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            trainer = pl.Trainer(
                accelerator=ACCELERATOR, devices=world_size, strategy=strategy, max_epochs=1,
                limit_train_batches=2, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(model, datamodule=Data(_BATCH // (1 if prescaled else 2)))
        state = trainer.strategy.lightning_module_state_dict()
        case = f"{name} {prescaled} {world_size // 2}"
        if rank == 0:
            torch.save(dict(state), folder / f"{case}.pt")
        losses = torch.tensor(model.losses, dtype=torch.float64)
        torch.save(losses, folder / f"{case} losses {rank}.pt")


@pytest.mark.timeout(150)
def test_draws_are_the_same_in_one_and_two_stages(tmp_path: Path) -> None:
    needs_devices(4)
    for world_size in (2, 4):
        run_ranks(_train_rank, world_size, tmp_path, timeout=100)
    for prescaled, name in _TRAINED:
        one, two = (
            [
                torch.load(tmp_path / f"{name} {prescaled} {stages} losses {rank}.pt")
                for rank in range(2 * stages)
            ]
            for stages in (1, 2)
        )
        where = f"{name} {prescaled}"
        torch.testing.assert_close(
            torch.stack(one).mean(0), torch.stack(two).mean(0), rtol=1e-10, atol=0, msg=where
        )
        if prescaled:
            assert torch.equal(one[0], one[1]), where
        wanted = torch.load(tmp_path / f"{where} 1.pt", map_location="cpu")
        found = torch.load(tmp_path / f"{where} 2.pt", map_location="cpu")
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(
                found[key],
                value,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda m, at=f"{where} {key}": f"{at}: {m}",
            )
