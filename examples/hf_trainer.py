"""Hugging Face's Trainer over two pipeline stages: it trains, evaluates, saves and resumes.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --output out
    torchrun --nproc-per-node 2 examples/hf_trainer.py --output out --resume
    python examples/hf_trainer.py --plain                # the same without lightning_smp

The Trainer still knows SageMaker's library by name (`is_sagemaker_mp_enabled`), and
`lightning_smp.compat` is that name. Model and data are made here: a tiny GPT-2 that learns to
count in steps. Under `python -m lightning_smp.run` a script needs neither of `set_up`'s lines.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_smp import compat

VOCABULARY = 48
LENGTH = 16


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count from a start in steps of 1 to 4, modulo the vocabulary."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (size, 1), generator=generator)
        step = torch.randint(1, 5, (size, 1), generator=generator)
        self.tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[0] = -100  # nothing comes before it
        return {"input_ids": self.tokens[index], "labels": labels}


def set_up(args: argparse.Namespace) -> None:
    """Tell the Trainer that it runs under SMP; before transformers is imported."""
    parameters = {
        "partitions": args.partitions,
        "microbatches": args.num_microbatches,
        "pipeline": args.pipeline,
        "ddp": True,
    }
    os.environ.setdefault("SM_HP_MP_PARAMETERS", json.dumps(parameters))
    os.environ.setdefault("SM_FRAMEWORK_PARAMS", json.dumps({"sagemaker_mpi_enabled": True}))
    compat.install()


def make_trainer(args: argparse.Namespace) -> Any:
    """Return an ordinary Trainer for an ordinary model."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=args.dropout, embd_pdrop=args.dropout,
        attn_pdrop=args.dropout, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=args.save_steps,
        save_steps=args.save_steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Counting(512, seed=1),
        eval_dataset=Counting(64, seed=2),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="hf_trainer_output")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--pipeline", choices=["simple", "interleaved"], default="interleaved")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="one process, without lightning_smp")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--report", default="", help="file for the numbers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(arguments)
    if not args.plain:
        set_up(args)
    trainer = make_trainer(args)
    trainer.train(resume_from_checkpoint=args.resume or None)
    metrics = trainer.evaluate()
    history = trainer.state.log_history
    report = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval_loss": metrics["eval_loss"],
        "step": trainer.state.global_step,
    }
    if trainer.is_world_process_zero():
        print(f"step {report['step']}: evaluation loss {report['eval_loss']:.4f}")
        if args.report:
            Path(args.report).write_text(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
