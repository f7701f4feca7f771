"""Tiny trainings in double precision that the tests spread over ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from flatout.agent.task import Task

WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 16, 4, 4, 32, 8, 8


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_size = heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, self.head_size).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.mlp = Gated(width)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Language(nn.Module):
    """A decoder as many write it: positions added, an assertion, a scale after the norm."""

    def __init__(self, width=WIDTH, heads=HEADS, layers=LAYERS, words=WORDS, *, ties=False):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)
        if ties:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        _, length = tokens.size()
        assert length <= LENGTH, "too long"
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


class Tokens(Dataset):
    def __init__(self, count=32):
        self.data = torch.randint(
            WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        return self.data[number][:-1], self.data[number][1:]


def starcoder(**changes):
    """Return a model of Transformers that brings a plan, and computes nothing in single."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return Starcoder2ForCausalLM(Starcoder2Config(**sizes, **heads, use_cache=False, **changes))


def loss(model, batch):
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def language(**changes):
    facts = {"ties": changes.pop("ties", False), "heads": changes.pop("heads", HEADS)}
    count = changes.pop("samples", 32)
    return Task(
        **{
            "model": lambda: Language(**facts).double(),
            "data": lambda: Tokens(count),
            "loss": loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "batch_size": BATCH,
            "steps": 3,
            "device": "cpu",
            "seed": 3,
        }
        | changes
    )
