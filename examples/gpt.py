"""A GPT in plain PyTorch that learns to write documentation, byte by byte, on two pipeline stages.

    python examples/gpt.py                               # Lightning starts the processes
    torchrun --nproc-per-node 2 examples/gpt.py          # torchrun does
    python examples/gpt.py --strategy auto               # plain Lightning, one process

The text is Python's own: its licence and the documentation strings of its standard library.
After training, rank 0 reads the checkpoint, an ordinary Lightning file, and lets the model write.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and around a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, S, width] with what attention and MLP add to it."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(pl.LightningModule):
    """A decoder whose head shares the embedding's weight; knows nothing of stages."""

    def __init__(
        self, context: int = 64, width: int = 96, depth: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 32, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [B, S, VOCABULARY] of the byte after each of ids [B, S]."""
        # The head wants a small weight, the first block a large input: hence the factor.
        x = self.embed(ids) * self.embed.embedding_dim**0.5
        x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """Return the prompt and ``length`` more bytes."""
        ids = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(ids[:, -self.context :])[:, -1] / temperature
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(ids[0].tolist()).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """All windows of ``size`` bytes of a text."""

    def __init__(self, text: str, size: int) -> None:
        self.bytes = torch.tensor(list(text.encode()))
        self.size = size

    def __len__(self) -> int:
        return len(self.bytes) - self.size + 1

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index : index + self.size]


class LossCurve(pl.Callback):
    """Keeps the logged loss of every step; every rank sees the same values."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def python_text() -> str:
    """Return Python's licence and the documentation strings of its standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text() for path in library.glob("LICENSE*")]
    for path in sorted(library.glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(filter(None, texts))


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
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    args = parse()
    pl.seed_everything(0)
    model, curve = GPT(), LossCurve()
    data = Windows(python_text(), model.context + 1)
    trainer = pl.Trainer(
        strategy=strategy(args),
        accelerator=args.accelerator,
        devices=args.devices or (2 if args.strategy == "smp" else 1),
        max_steps=args.max_steps,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(data, args.batch_size, shuffle=True))
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.strategy.broadcast(f"{folder}/gpt.ckpt")
        trainer.save_checkpoint(path)  # every rank calls it; rank 0 writes one ordinary file
        if trainer.is_global_zero:
            print(f"loss: {curve.losses[0]:.2f} -> {sum(curve.losses[-10:]) / 10:.2f}")
            whole = GPT.load_from_checkpoint(path, map_location="cpu", weights_only=True)
            print(whole.eval().write("Return the ", length=200))
        trainer.strategy.barrier()


if __name__ == "__main__":
    main()
