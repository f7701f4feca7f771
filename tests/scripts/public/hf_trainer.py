"""Train a tiny GPT-2 with the Hugging Face Trainer: evaluation, checkpoints, log history."""

import argparse
import json
import os

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class Counting(Dataset):
    """Sequences that count up from a random start: easy to learn, nothing to download."""

    def __init__(self, size, length, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, vocab_size, (size, 1), generator=generator)
        self.ids = (starts + torch.arange(length)) % vocab_size

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


def compute_metrics(prediction):
    logits, labels = prediction
    hits = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"accuracy": float(hits.mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--output-dir", default="output")
    args = parser.parse_args()

    set_seed(42)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.output_dir,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=32,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=1e-3,
            warmup_steps=5,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            logging_steps=1,
            optim="adamw_torch",
            report_to="none",
            seed=42,
        ),
        train_dataset=Counting(192, 32, 64, seed=0),
        eval_dataset=Counting(64, 32, 64, seed=1),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model(os.path.join(args.output_dir, "final"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    with open(os.path.join(args.output_dir, "losses.json"), "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main()
