"""Fine-tune a tiny BERT with Accelerate: accumulation, evaluation, save_state every epoch."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)


def sentences(size, seed):
    """Return sentences of random length; the class says whether word 7 occurs."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(size):
        length = int(torch.randint(6, 20, (1,), generator=generator))
        words = torch.randint(8, 50, (length,), generator=generator)
        label = int(torch.randint(0, 2, (1,), generator=generator))
        if label:
            words[length // 2] = 7
        rows.append({"input_ids": words, "labels": label})
    return rows


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    set_seed(args.seed)
    train_dataloader = DataLoader(
        sentences(256, 0), shuffle=True, collate_fn=collate, batch_size=args.batch_size
    )
    eval_dataloader = DataLoader(sentences(96, 1), collate_fn=collate, batch_size=32)
    config = BertConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    model = BertForSequenceClassification(config)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 5, len(train_dataloader) * args.num_epochs
    )
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )

    losses, running = [], []
    for epoch in range(args.num_epochs):
        model.train()
        for batch in tqdm(train_dataloader, disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                running.append(loss.item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(sum(running) / len(running))
                    running.clear()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        hits = []
        for batch in eval_dataloader:
            with torch.no_grad():
                logits = model(**batch).logits
            predictions, labels = accelerator.gather_for_metrics(
                (logits.argmax(-1), batch["labels"])
            )
            hits.append((predictions == labels).float())
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).mean():.3f}")
        accelerator.save_state(os.path.join(args.output_dir, "state"))
    with open(os.path.join(args.output_dir, "losses.json"), "w") as file:
        json.dump(losses, file)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output-dir", default="output")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
