"""Train a character model: mixed precision, accumulation, clipping, resume, all by hand."""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog and runs back again. " * 60


class Characters(Dataset):
    def __init__(self, text, block_size):
        self.vocabulary = sorted(set(text))
        lookup = {letter: number for number, letter in enumerate(self.vocabulary)}
        self.ids = torch.tensor([lookup[letter] for letter in text])
        self.block_size = block_size

    def __len__(self):
        return (len(self.ids) - 1) // self.block_size

    def __getitem__(self, index):
        start = index * self.block_size
        part = self.ids[start : start + self.block_size + 1]
        return {"input_ids": part[:-1], "labels": part[1:]}


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharModel(nn.Module):
    def __init__(self, vocab_size, block_size, width=64, layers=2, heads=4, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.zeros(1, block_size, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids, labels=None):
        x = self.tokens(input_ids) + self.positions[:, : input_ids.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))
        return {"loss": loss, "logits": logits}


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, step / args.decay_steps)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--decay-steps", type=int, default=200)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output-dir", type=Path, default=Path("output"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()

    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.output_dir.mkdir(exist_ok=True)
    data = Characters(TEXT, args.block_size)
    train_data, test_data = torch.utils.data.random_split(data, [0.9, 0.1])
    loader = DataLoader(train_data, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_data, args.batch_size)
    model = CharModel(len(data.vocabulary), args.block_size, dropout=args.dropout).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(device, enabled=args.amp)
    if args.resume is not None:
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    step, losses, running = 0, [], 0.0
    optimizer.zero_grad(set_to_none=True)
    for epoch in range(args.epochs):
        model.train()
        for number, batch in enumerate(loader):
            batch = {key: value.to(device) for key, value in batch.items()}
            with torch.autocast(device, dtype=torch.bfloat16, enabled=args.amp):
                loss = model(**batch)["loss"] / args.accumulate
            scaler.scale(loss).backward()
            running += loss.item()
            if (number + 1) % args.accumulate:
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, args)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(running)
            running = 0.0
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {losses[-1]:.4f}", flush=True)
        model.eval()
        with torch.inference_mode():
            total = [model(**{k: v.to(device) for k, v in b.items()})["loss"] for b in test_loader]
        print(f"epoch {epoch} held-out loss {torch.stack(total).mean():.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.output_dir / "last.pt")
    (args.output_dir / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
