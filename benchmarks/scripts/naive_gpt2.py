"""Train GPT-2 124M on random tokens, written as a first version is: fp32, attention by hand.

python naive_gpt2.py --batch-size 16 --context 1024
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class RandomTokens(Dataset):
    """Pieces of a random text: what is learnt does not matter here, what it costs does."""

    def __init__(self, vocabulary, context, pieces):
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(vocabulary, (pieces * context + 1,), generator=generator)
        self.context = context
        self.pieces = pieces

    def __len__(self):
        return self.pieces

    def __getitem__(self, index):
        piece = self.text[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class Attention(nn.Module):
    """Causal attention with the scores written out."""

    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).bool())

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        y = functional.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a shortcut."""

    def __init__(self, width, heads, context):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, vocabulary, context, layers, width, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse_arguments():
    """Return the command line's settings; the defaults are GPT-2 124M."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100_000)
    return parser.parse_args()


def parts(args):
    """Return the data set and the model."""
    data = RandomTokens(args.vocabulary, args.context, 64 * args.batch_size)
    torch.manual_seed(0)
    return data, GPT2(args.vocabulary, args.context, args.layers, args.width, args.heads)


def loss_of(logits, targets):
    """Return the mean over all tokens."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main():
    """Train until the steps are made."""
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, model = parts(args)
    model = model.to(device)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = 0
    while step < args.steps:
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            loss = loss_of(model(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0:
                print(step, loss.item())
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
