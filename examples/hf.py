"""Hugging Face's GPT-2 and Llama, untouched, from a tiny configuration, on two pipeline stages.

    python examples/hf.py --model llama                  # Lightning starts the processes
    torchrun --nproc-per-node 2 examples/hf.py           # torchrun does
    python examples/hf.py --strategy auto                # plain Lightning, one process

The text is the source of a module of Python's standard library, as bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 256  # bytes
CONTEXT = 64


def gpt2() -> PreTrainedModel:
    """Return a small GPT-2 with Hugging Face's defaults: dropout, cache, tied embeddings."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> PreTrainedModel:
    """Return a small Llama with Hugging Face's defaults: rotary positions, an untied head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class LanguageModel(pl.LightningModule):
    """Any causal language model of Hugging Face; the model computes its own loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class LossCurve(pl.Callback):
    """Keeps the logged loss of every step; every rank sees the same values."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def chunks() -> list[Tensor]:
    """Return the text as pieces of CONTEXT bytes."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return list(text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT))


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
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--strategy", choices=["smp", "auto"], default="smp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, help="default: 2 with smp, else 1")
    parser.add_argument("--pipeline-parallel-degree", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    args = parse()
    pl.seed_everything(0)
    curve = LossCurve()
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
    model = LanguageModel({"gpt2": gpt2, "llama": llama}[args.model]())
    trainer.fit(model, DataLoader(chunks(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print(f"{args.model} loss: {curve.losses[0]:.2f} -> {sum(curve.losses[-10:]) / 10:.2f}")


if __name__ == "__main__":
    main()
