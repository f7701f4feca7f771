"""Train a tiny GPT with attention written by hand on text that the script makes up.

python naive_gpt.py [--optimizer AdamW] [--accumulate 1] [--clip 0] [--schedule]
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCABULARY, CONTEXT, WIDTH, HEADS = 61, 16, 32, 4


class Text(Dataset):
    """Sequences that count up, so that there is something to learn."""

    def __len__(self):
        return 512

    def __getitem__(self, number):
        tokens = (torch.arange(CONTEXT + 1) * (1 + number % 3) + number) % VOCABULARY
        return tokens[:-1], tokens[1:]


class Attention(nn.Module):
    """Causal self-attention, every step of it by hand."""

    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(CONTEXT, CONTEXT))[None, None])

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.dropout(functional.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    """Attention and MLP with shortcuts."""

    def __init__(self, dropout, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder."""

    def __init__(self, dropout=0.0, vocabulary=VOCABULARY, inner=4 * WIDTH):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, inner) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--inner", type=int, default=4 * WIDTH)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(args.dropout, args.vocabulary, args.inner)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10) if args.schedule else None
    step = 0
    for _ in range(args.epochs):
        for number, (tokens, targets) in enumerate(DataLoader(Text(), batch_size=8)):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / args.accumulate).backward()
            if (number + 1) % args.accumulate:
                continue
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
