"""A script in the style of SageMaker's examples: handwritten digits with `smp` and no Lightning.

    torchrun --nproc-per-node 2 examples/smp_script.py
    torchrun --nproc-per-node 4 examples/smp_script.py --partitions 2 --pipeline simple --amp
    python examples/smp_script.py --partitions 1

Only `import smdistributed.modelparallel.torch as smp` has become `import lightning_smp as smp`; and
`torchrun -m lightning_smp.run` runs it with the former as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_smp as smp

Data = tuple[TensorDataset, TensorDataset]


class Features(nn.Module):
    """Images [B, 1, 8, 8] to features [B, 64, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        return F.max_pool2d(F.relu(self.conv2(x)), 2)


class Classifier(nn.Module):
    """Features [B, 256] to log-probabilities [B, 10]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(256, 64)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, features: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.fc1(features)))
        return F.log_softmax(self.fc2(x), dim=1)


class Net(nn.Module):
    """Two groups of layers, which suits two partitions; four cut them further."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(Features(), nn.Flatten())
        self.hidden = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.classifier = Classifier(dropout)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.middle(self.hidden(self.features(images))))


@smp.step
def train_step(
    model: Any, scaler: Any, args: argparse.Namespace, data: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    device_type = data.device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=args.amp):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    model.backward(scaler.scale(loss) if args.amp else loss)
    return output, loss


@smp.step
def test_step(model: Any, data: Tensor, target: Tensor) -> tuple[float, int]:
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    correct = output.argmax(dim=1).eq(target).sum().item()
    return loss, int(correct)


def train(
    args: argparse.Namespace, model: Any, scaler: Any, device: Any, loader: Any, optimizer: Any
) -> list[float]:
    model.train()
    losses = []
    for data, target in loader:
        optimizer.zero_grad(set_to_none=True)
        _, loss_mb = train_step(model, scaler, args, data.to(device), target.to(device))
        losses.append(loss_mb.reduce_mean().item())
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return losses


def test(model: Any, device: Any, loader: Any) -> dict[str, float]:
    model.eval()
    total_loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            loss_mb, correct_mb = test_step(model, data.to(device), target.to(device))
            total_loss += sum(loss_mb)
            correct += sum(correct_mb)
            count += len(data)
    return {"loss": total_loss / count, "accuracy": correct / count}


def datasets() -> Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    return TensorDataset(*data[:1536]), TensorDataset(*data[1536:])


def loaders(args: argparse.Namespace, data: Data) -> tuple[Any, Any]:
    """Ranks of one model group see the same batches, so they share `dp_rank`."""
    sampler: Any = DistributedSampler(
        data[0], num_replicas=smp.dp_size(), rank=smp.dp_rank(), shuffle=args.shuffle, seed=1
    )
    train_loader = DataLoader(data[0], args.batch_size, sampler=sampler, drop_last=True)
    return train_loader, DataLoader(data[1], args.batch_size, drop_last=True)


def save(args: argparse.Namespace, model: Any, optimizer: Any) -> None:
    """All ranks with dp_rank 0 save; of a full checkpoint the library writes one file."""
    if smp.dp_rank() != 0:
        return
    if args.save_partial:
        parts = {
            "model_state_dict": model.local_state_dict(),
            "optimizer_state_dict": optimizer.local_state_dict(),
        }
        smp.save(parts, args.save_partial, partial=True)
    if args.save_full:
        whole = {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
        }
        smp.save(whole, args.save_full, partial=False)


def load(args: argparse.Namespace, model: Any, optimizer: Any) -> None:
    path = args.load_partial or args.load_full
    if path:
        checkpoint = smp.load(path, partial=bool(args.load_partial), map_location="cpu")
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--pipeline", choices=["simple", "interleaved"], default="interleaved")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=0, help="steps an epoch; 0: all")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16, with a scaler")
    parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
    for name in ("--save-partial", "--save-full", "--load-partial", "--load-full", "--report"):
        parser.add_argument(name, default="")
    return parser.parse_known_args(arguments)[0]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.num_microbatches,
            "pipeline": args.pipeline,
            "ddp": True,
        }
    )
    torch.manual_seed(0)
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if use_cuda else "cpu")

    data = datasets()
    if args.max_steps:
        samples = args.max_steps * args.batch_size * smp.dp_size()
        data = (TensorDataset(*data[0][:samples]), data[1])
    train_loader, test_loader = loaders(args, data)
    model = smp.DistributedModel(Net(args.dropout))
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    load(args, model, optimizer)

    losses: list[float] = []
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        losses += train(args, model, scaler, device, train_loader, optimizer)
        scheduler.step()
    report = {"losses": losses, "test": test(model, device, test_loader)}
    save(args, model, optimizer)
    smp.barrier()
    if smp.rank() == 0:
        print(f"test accuracy: {report['test']['accuracy']:.1%}")
        if args.report:
            Path(args.report).write_text(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
