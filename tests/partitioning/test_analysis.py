"""The analysis sees order and costs, and leaves the model and the world as they were."""

from __future__ import annotations

import random
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_smp.partitioning.analysis import Analysis, analyze
from lightning_smp.partitioning.atoms import find_atoms
from lightning_smp.partitioning.fakes import fake_batch, new_fake_mode
from tests.partitioning import zoo
from tests.partitioning.test_atoms import hugging_face

IDS = torch.zeros(2, 8, dtype=torch.long)


def run(root: nn.Module, step: Callable[[Any, Any], object], batch: Any) -> Analysis:
    mode = new_fake_mode()
    fake = fake_batch(batch, mode)
    return analyze(root, lambda copied: step(copied, fake), find_atoms(root), mode=mode)


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (zoo.mlp, torch.zeros(3, 16)),
        (zoo.cnn, torch.zeros(3, 1, 12, 12)),
        (zoo.UNet, torch.zeros(2, 1, 16, 16)),
        (zoo.Swin, torch.zeros(2, 5, 4)),
    ],
)
def test_every_stateful_atom_costs(make: Callable[[], nn.Module], batch: Tensor) -> None:
    root = make()
    found = run(root, lambda net, x: net(x).sum(), batch)
    assert found.reason is None
    for atom in find_atoms(root):
        cost = found.costs[atom.name]
        assert cost.calls == 1
        assert cost.output_bytes > 0
        if not atom.is_stateless:
            assert cost.forward_s > 0
            assert cost.backward_s > 0
    # An activation counts where it is saved first, so single atoms may have none.
    assert sum(cost.saved_bytes for cost in found.costs.values()) > 0


def test_gpt_order_flops_and_equal_blocks() -> None:
    root = zoo.GPT(3, dim=16, tied=True)
    found = run(root, zoo.gpt_step, IDS)
    assert found.order == ("wte", "wpe", "blocks.0", "blocks.1", "blocks.2", "ln_f", "head")
    assert found.costs["blocks.0"] == found.costs["blocks.2"]
    assert found.costs["head"].flops == 2 * IDS.numel() * 16 * 32
    assert found.costs["head"].parameter_bytes == 32 * 16 * 4
    assert found.costs["head"].state_bytes == 4 * 32 * 16 * 4


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face_with_mask(kind: str) -> None:
    root = hugging_face(kind)
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}
    found = run(root, lambda net, fake: net(**fake).loss, batch)
    assert found.reason is None
    assert all(cost.forward_s > 0 for name, cost in found.costs.items() if name in found.order)


def test_execution_order_is_not_module_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.first(x)))

    found = run(Backwards(), lambda net, x: net(x), torch.zeros(2, 4))
    assert found.order == ("first", "first", "second")
    assert found.costs["first"].calls == 2


def test_frozen_atoms_have_cheaper_backwards() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    root[0].requires_grad_(False)
    root[2].requires_grad_(False)
    found = run(root, lambda net, x: net(x), torch.zeros(2, 4))
    products = {
        name: sum(kernel.kind == "product" for kernel in work.backward)
        for name, work in found.work.items()
    }
    assert found.costs["0"].backward_s == 0
    # No gradient of 1's input is wanted, and none of 2's parameters.
    assert products == {None: 0, "0": 0, "1": 1, "2": 1}
    assert found.costs["2"].state_bytes == found.costs["2"].parameter_bytes


def test_the_model_is_left_alone() -> None:
    root = zoo.cnn()
    root.train()
    before = {name: tensor.clone() for name, tensor in root.state_dict().items()}
    identities = [id(p) for p in root.parameters()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    def step(net: Any, x: Any) -> object:
        random.random()
        np.random.rand()
        loss = net(x + torch.randn_like(x)).sum()
        net.mark = 1
        loss.backward()
        return loss

    found = run(root, step, torch.zeros(2, 1, 12, 12))
    assert found.reason is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    assert [id(p) for p in root.parameters()] == identities
    assert all(p.grad is None for p in root.parameters())
    assert not hasattr(root, "mark")
    assert all(torch.equal(before[k], v) for k, v in root.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in root.modules())


def test_mutable_buffers_are_named() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("fixed", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.layer(x) * self.fixed

    found = run(Counter(), lambda net, x: net(x), torch.zeros(2, 4))
    assert found.mutable_buffers == {"seen"}
    bn = run(zoo.cnn(), lambda net, x: net(x), torch.zeros(2, 1, 12, 12))
    assert "1.running_mean" in bn.mutable_buffers


@pytest.mark.parametrize(
    "step",
    [
        lambda net, x: net(x).sum().item(),
        lambda net, x: bool((net(x) > 0).any()),
        lambda net, x: 1 / 0,
        lambda net, x: net(x).nonexistent,
    ],
)
def test_failure_gives_reason_and_parameter_counts(step: Callable[[Any, Any], object]) -> None:
    root = zoo.mlp(depth=2)
    found = run(root, step, torch.zeros(2, 16))
    assert found.reason
    assert "Error" in found.reason or "Exception" in found.reason
    assert found.order == tuple(atom.name for atom in find_atoms(root))
    assert found.costs["0"].forward_s > found.costs["4"].forward_s > 0
    assert found.costs["1"].forward_s == 0


def test_attributes_that_cannot_be_copied_are_shared() -> None:
    root = zoo.mlp()
    root.lock = threading.Lock()
    root.tools = [random, torch.Generator()]
    assert run(root, lambda net, x: net(x), torch.zeros(2, 16)).reason is None


def test_lazy_modules_give_a_reason() -> None:
    root = nn.Sequential(nn.LazyLinear(4))
    assert "lazy" in (run(root, lambda net, x: net(x), torch.zeros(2, 4)).reason or "")


def test_gradients_are_recorded_from_a_caller_without() -> None:
    with torch.no_grad():
        found = run(zoo.mlp(), lambda net, x: net(x), torch.zeros(2, 16))
    assert found.costs["0"].backward_s > 0
    with torch.inference_mode():
        found = run(zoo.mlp(), lambda net, x: net(x), torch.zeros(2, 16))
    assert found.reason is None
    assert found.costs["0"].saved_bytes > 0


def test_real_and_meta_tensors_are_accepted() -> None:
    batch = torch.zeros(2, 16)
    real = analyze(zoo.mlp(), lambda net: net(batch), find_atoms(zoo.mlp()))
    with torch.device("meta"):
        root = zoo.mlp()
    meta = run(root, lambda net, x: net(x), torch.zeros(2, 16))
    assert real.reason is meta.reason is None
    assert real.costs == meta.costs


def test_same_result_twice() -> None:
    assert run(zoo.GPT(), zoo.gpt_step, IDS) == run(zoo.GPT(), zoo.gpt_step, IDS)


class Classifier(lightning.LightningModule):
    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.net = zoo.mlp()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.both = torchmetrics.MetricCollection([torchmetrics.classification.BinaryAccuracy()])
        self.automatic_optimization = not manual
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)[:, 0]
        loss = F.binary_cross_entropy_with_logits(logits, y)
        self.log("loss", loss, on_step=True)
        self.log_dict(self.both(logits, y.long()))
        self.log("accuracy", self.accuracy(logits, y.long()))
        self.history.append(1.0)
        self.logger.experiment.add_scalar("x", 1)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_module_inside_a_trainer(manual: bool, tmp_path: Any) -> None:
    found: list[Analysis] = []
    batch = (torch.zeros(4, 16), torch.ones(4))

    class Probe(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), 0.1)

        def on_train_start(self) -> None:
            before = [p.clone() for p in self.parameters()]
            found.append(run(self, lambda net, x: net.training_step(x, 0), batch))
            assert all(torch.equal(a, b) for a, b in zip(before, self.parameters(), strict=True))
            assert self.history == []
            assert self.accuracy.update_count == 0
            assert self.trainer.global_step == 0
            assert not self.trainer.callback_metrics
            raise KeyboardInterrupt

    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(BaseException):  # noqa: B017, PT011  # Lightning exits on an interrupt
        trainer.fit(Probe(manual=manual), torch.utils.data.DataLoader([0]))
    assert found[0].reason is None
    assert found[0].order == tuple(f"net.{i}" for i in range(9))


def test_fake_batch_looks_into_unknown_containers() -> None:
    @dataclass(frozen=True)
    class Pair:
        x: Tensor
        name: str

    class Encoding(UserDict):  # type: ignore[type-arg]
        pass

    batch = {"a": [torch.ones(2)], "b": Pair(torch.ones(3), "n"), "c": Encoding(k=torch.ones(4))}
    fake = fake_batch(batch, new_fake_mode())
    assert isinstance(fake["a"][0], FakeTensor)
    assert isinstance(fake["b"].x, FakeTensor)
    assert fake["b"].name == "n"
    assert isinstance(fake["c"]["k"], FakeTensor)
    assert fake["c"]["k"].shape == (4,)
    assert not isinstance(batch["c"]["k"], FakeTensor)  # type: ignore[index]
    assert not isinstance(batch["b"].x, FakeTensor)  # type: ignore[attr-defined]
