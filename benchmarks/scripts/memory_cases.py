"""Training steps whose predicted memory is compared with a GPU's, in plain torch."""

import itertools
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from flatout.planner.tracing.training_step import TrainingStep

CLASSES = 1000


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        return functional.relu(self.body(x) + self.short(x))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a shortcut."""

    def __init__(self, width, heads, *, is_causal):
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, width=768, depth=8, heads=12, vocabulary=32_000, length=512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, is_causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, numbers):
        x = self.tokens(numbers) + self.places(
            torch.arange(numbers.shape[1], device=numbers.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Patches(nn.Module):
    """A small ViT."""

    def __init__(self, width=384, depth=12, heads=6):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(Block(width, heads, is_causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pictures):
        x = self.cut(pictures).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self, width=1024, vocabulary=10_000):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, numbers):
        return self.head(self.lstm(self.tokens(numbers))[0])


def plain_cnn():
    widths = (3, 64, 128, 256)
    layers = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, CLASSES))


def residual_cnn():
    widths = (64, 64, 128, 256, 512)
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    for inner, outer in itertools.pairwise(widths):
        layers += [Residual(inner, outer, 1 + (outer > 64)), Residual(outer, outer, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def images(count, device):
    pictures = torch.zeros(count, 3, 224, 224, device=device)
    return pictures, torch.zeros(count, dtype=torch.long, device=device)


def texts(count, device):
    numbers = torch.zeros(count, 512, dtype=torch.long, device=device)
    return numbers, numbers


def class_loss(model, pair):
    return functional.cross_entropy(model(pair[0]), pair[1])


def token_loss(model, pair):
    return functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters())


def fused_adam(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


cnn_fp32 = TrainingStep(model=plain_cnn, batch=images, loss=class_loss, optimizer=momentum)
cnn_bf16 = replace(cnn_fp32, autocast="bfloat16")
resnet_fp32 = TrainingStep(model=residual_cnn, batch=images, loss=class_loss, optimizer=momentum)
resnet_fp16 = replace(resnet_fp32, autocast="float16", scales_gradients=True)
gpt_fp32 = TrainingStep(model=Decoder, batch=texts, loss=token_loss, optimizer=adam)
gpt_bf16 = replace(gpt_fp32, autocast="bfloat16")
gpt_fused = replace(gpt_bf16, optimizer=fused_adam, accumulate=2)
vit_fp32 = TrainingStep(model=Patches, batch=images, loss=class_loss, optimizer=adam)
vit_bf16 = replace(vit_fp32, autocast="bfloat16")
lstm_fp32 = TrainingStep(model=Recurrent, batch=texts, loss=token_loss, optimizer=adam)
lstm_fp16 = replace(lstm_fp32, autocast="float16", scales_gradients=True)
clipped_bf16 = replace(gpt_bf16, clip_norm=1.0)

BATCHES = {
    "cnn_fp32": (32, 96),
    "cnn_bf16": (32, 96),
    "resnet_fp32": (32, 128),
    "resnet_fp16": (32, 128),
    "gpt_fp32": (4, 24),
    "gpt_bf16": (4, 24),
    "gpt_fused": (4, 24),
    "vit_fp32": (16, 96),
    "vit_bf16": (16, 96),
    "lstm_fp32": (8, 48),
    "lstm_fp16": (8, 48),
    "clipped_bf16": (8, 32),
}
"""Twelve subjects at two batches each: 24 cases."""
