"""GPT-2 124M in bf16 autocast with AdamW, 8 x 1024 tokens: planned, never built."""

import torch
from torch import nn
from torch.nn import functional

from flatout.planner.tracing.training_step import TrainingStep

WIDTH, DEPTH, HEADS, VOCABULARY, LENGTH = 768, 12, 12, 50_257, 1024


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, 2)
        shape = (batch, length, HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, numbers):
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.tokens(numbers) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def batch(count, device):
    numbers = torch.zeros(count, LENGTH, dtype=torch.long, device=device)
    return numbers, numbers


def loss(model, pair):
    return functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-4)


subject = TrainingStep(
    model=Gpt2,
    batch=batch,
    loss=loss,
    optimizer=optimizer,
    batch_size=8,
    autocast="bfloat16",
)
