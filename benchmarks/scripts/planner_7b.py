"""A decoder of 7B parameters in bf16, frozen, with LoRA on its attention: planned, never built."""

import torch
from torch import nn
from torch.nn import functional

from flatout.planner.tracing.training_step import TrainingStep

WIDTH, DEPTH, HEADS, INNER, VOCABULARY = 4096, 32, 32, 11_008, 32_000
LENGTH, RANK = 1024, 16


class Adapted(nn.Module):
    """A frozen product with two thin, trained ones alongside it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(inner, RANK, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(RANK, outer, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention and a gated MLP, as Llama's."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, dtype=torch.bfloat16) for _ in range(2))
        self.q, self.k, self.v, self.o = (Adapted(WIDTH, WIDTH) for _ in range(4))
        options = {"bias": False, "dtype": torch.bfloat16}
        self.gate, self.up = (nn.Linear(WIDTH, INNER, **options) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, **options)

    def forward(self, x):
        batch, length, _ = x.shape
        shape = (batch, length, HEADS, WIDTH // HEADS)
        y = self.norm1(x)
        q, k, v = (part(y).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Blocks between an embedding and a head, all frozen but for the adapters."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Adapted):
                module.down.weight.requires_grad_(True)
                module.up.weight.requires_grad_(True)

    def forward(self, numbers):
        x = self.tokens(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(count, device):
    numbers = torch.zeros(count, LENGTH, dtype=torch.long, device=device)
    return numbers, numbers


def loss(model, pair):
    return functional.cross_entropy(model(pair[0]).flatten(0, 1).float(), pair[1].flatten())


def optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


subject = TrainingStep(model=Decoder, batch=batch, loss=loss, optimizer=optimizer, batch_size=2)
