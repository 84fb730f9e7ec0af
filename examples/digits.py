"""Handwritten digits with a small network of convolutions, as two pipeline stages on two processes.

    python examples/digits.py                            # Lightning starts the processes
    torchrun --nproc-per-node 2 examples/digits.py       # torchrun does
    python examples/digits.py --strategy auto            # plain Lightning, one process

The data are the 1797 images of 8 x 8 pixels that scikit-learn ships.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Digits(pl.LightningModule):
    """Classifies images [B, 1, 8, 8]; knows nothing of stages or microbatches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU()),
            nn.Linear(64, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loaders(batch_size: int = 64) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Return loaders of the training and the validation images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def strategy(args: argparse.Namespace) -> Strategy | str:
    """Return what to give the Trainer: the one thing that differs from plain Lightning."""
    if args.strategy != "smp":
        return args.strategy
    from lightning_smp import SMPStrategy

    return SMPStrategy(
        pipeline_parallel_degree=args.pipeline_parallel_degree, microbatches=args.microbatches
    )


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["smp", "auto"], default="smp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, help="default: 2 with smp, else 1")
    parser.add_argument("--pipeline-parallel-degree", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--max-epochs", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=strategy(args),
        accelerator=args.accelerator,
        devices=args.devices or (2 if args.strategy == "smp" else 1),
        max_epochs=args.max_epochs,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(Digits(), *loaders())
    accuracy = float(trainer.callback_metrics["val_accuracy"])
    if trainer.is_global_zero:
        print(f"validation accuracy: {accuracy:.1%}")


if __name__ == "__main__":
    main()
