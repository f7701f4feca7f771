"""Train a small language model written by hand: odd widths, a large vocabulary, maybe experts.

python naive_language.py --experts 8
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CONTEXT = 64


class Rows(Dataset):
    """Rows of tokens that follow each other by a fixed rule: there is something to learn."""

    def __init__(self, count, vocabulary):
        generator = torch.Generator().manual_seed(0)
        self.first = torch.randint(vocabulary, (count,), generator=generator)
        self.vocabulary = vocabulary

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        row = (self.first[index] + 7 * torch.arange(CONTEXT + 1)) % self.vocabulary
        return row[:-1], row[1:]


class Experts(nn.Module):
    """Two of the experts for each token, one expert after the other."""

    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(dim=-1).topk(2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, width, heads, experts):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = (
            Experts(width, experts)
            if experts
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, vocabulary, width, layers, experts):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=20001)
    parser.add_argument("--width", type=int, default=132)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Language(args.vocabulary, args.width, args.layers, args.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Rows(20_000, args.vocabulary), args.batch_size, shuffle=True)
    for epoch in range(100):
        for tokens, targets in loader:
            optimizer.zero_grad()
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
