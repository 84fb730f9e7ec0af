"""A LightningCLI program: the strategy is chosen in a YAML file or on the command line.

    python examples/cli.py fit --config examples/cli.yaml
    torchrun --nproc-per-node 2 examples/cli.py fit --config examples/cli.yaml
    python examples/cli.py fit --config examples/cli.yaml \\
        --trainer.strategy=auto --trainer.devices=1      # plain Lightning, one process

The program does not mention lightning_smp. The data are scikit-learn's handwritten digits.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import multiclass_accuracy

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """An MLP; its optimizer comes from the configuration."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth - 1)]
        enter = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.net = nn.Sequential(enter, *hidden, nn.Linear(width, 10))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        accuracy = multiclass_accuracy(self.net(x), y, num_classes=10, average="micro")
        self.log("val_accuracy", accuracy, prog_bar=True)


class Digits(pl.LightningDataModule):
    """Images of digits as vectors of 64 pixels."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
        data = TensorDataset(pixels, torch.tensor(digits.target))
        seed = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(data, [0.8, 0.2], seed)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)


def main() -> None:
    cli = LightningCLI(Classifier, Digits, save_config_callback=None)
    accuracy = cli.trainer.callback_metrics.get("val_accuracy")
    if cli.trainer.is_global_zero and accuracy is not None:
        print(f"validation accuracy: {float(accuracy):.1%}")


if __name__ == "__main__":
    main()
