"""Train low-rank adapters on a frozen decoder of a billion parameters, in fp32.

python naive_lora.py --batch-size 4 --context 1024
"""

import argparse

import torch
from naive_gpt2 import RandomTokens, loss_of
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter alongside it."""

    def __init__(self, before, after, rank):
        super().__init__()
        self.base = nn.Linear(before, after, bias=False).requires_grad_(False)
        self.down = nn.Linear(before, rank, bias=False)
        self.up = nn.Linear(rank, after, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A block as Llama has it, without rotary positions: they cost next to nothing."""

    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.value = Adapted(width, width, rank), Adapted(width, width, rank)
        self.key = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.out = nn.Linear(width, width, bias=False).requires_grad_(False)
        hidden = 8 * width // 3 // 64 * 64
        self.gate = nn.Linear(width, hidden, bias=False).requires_grad_(False)
        self.up = nn.Linear(width, hidden, bias=False).requires_grad_(False)
        self.down = nn.Linear(hidden, width, bias=False).requires_grad_(False)

    def forward(self, x):
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """The frozen decoder with its adapters."""

    def __init__(self, vocabulary, layers, width, heads, rank):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, heads, rank) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse_arguments():
    """Return the command line's settings; the defaults make 1.0 billion parameters."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100_000)
    return parser.parse_args()


def parts(args):
    """Return the data set and the model, which is on the device already."""
    torch.manual_seed(0)
    data = RandomTokens(args.vocabulary, args.context, 64 * args.batch_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # a billion random numbers take long on a CPU
        return data, Decoder(args.vocabulary, args.layers, args.width, args.heads, args.rank)


def main():
    """Train until the steps are made."""
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, model = parts(args)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
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
