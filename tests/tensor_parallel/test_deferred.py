"""Models that are built without memory, split over tensor groups and stages, equal one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_smp as smp
from lightning_smp import SMPStrategy
from lightning_smp.deferred import is_deferred
from tests.support.launch import run_ranks
from tests.tensor_parallel.models import NUM_TOKENS, Data, Perceptron
from tests.tensor_parallel.test_equality import train

_BATCH = 12


class _Net(nn.Module):
    """A tied Hugging Face model, and a user's own with marked layers."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as t

        self.own = Perceptron()
        self.gpt2 = t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=NUM_TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.own(ids) + self.gpt2(ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class _Model(pl.LightningModule):
    """Makes its parts in `configure_model`, in float64, and looks at its memory."""

    def __init__(self, *, delayed: bool) -> None:
        super().__init__()
        self.delayed = delayed
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(11)
        torch.set_default_dtype(torch.float64)
        try:
            with smp.delay_param_initialization(enabled=self.delayed):
                self.net = _Net()
        finally:
            torch.set_default_dtype(torch.float32)

    def on_train_start(self) -> None:
        assert all(is_deferred(p) == self.delayed for p in self.parameters())

    def on_train_end(self) -> None:
        assert not any(is_deferred(p) for p in self.parameters())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = self.net(batch[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def _rank(rank: int, world_size: int, folder: Path) -> None:
    strategy = SMPStrategy(
        tensor_parallel_degree=2, pipeline_parallel_degree=world_size // 2, microbatches=3,
        tensor_parallel_modules="auto",
    )  # fmt: skip
    model = _Model(delayed=True)
    trainer = train(model, Data(_BATCH // 2), devices=world_size, strategy=strategy)  # type: ignore[arg-type]
    state: Any = trainer.strategy.lightning_module_state_dict()
    if rank == 0:
        torch.save(dict(state), folder / "weights.pt")


def test_training_equals_one_device(tmp_path: Path) -> None:
    reference = _Model(delayed=False)
    train(reference, Data(_BATCH), devices=1)  # type: ignore[arg-type]
    wanted = reference.state_dict()
    run_ranks(_rank, 4, tmp_path, timeout=100)
    found = torch.load(tmp_path / "weights.pt")
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(
            found[name], weight, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name} {m}"
        )
