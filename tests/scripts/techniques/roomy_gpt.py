"""A small language model with dropout, trained on made-up text.

python roomy_gpt.py [--batch-norm] [--clip] [--accumulate] [--scaler] [--look] [--closure]
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH, DEPTH = 211, 32, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.middle = nn.BatchNorm1d(LENGTH) if "--batch-norm" in sys.argv else nn.Identity()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.middle(x)))


def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def step(model, optimizer, batch):
    """Make one step, in the way that was asked for."""
    if "--closure" in sys.argv:

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)
    scaler = torch.amp.GradScaler("cpu", enabled="--scaler" in sys.argv)
    optimizer.zero_grad()
    parts = batch.chunk(2) if "--accumulate" in sys.argv else [batch]
    for part in parts:
        scaler.scale(loss_of(model, part) / len(parts)).backward()
    if "--clip" in sys.argv:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if "--look" in sys.argv:
        print(sum(p.grad.square().sum() for p in model.parameters()))
    return scaler.step(optimizer)


def main():
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (512, LENGTH + 1))
    loader = DataLoader(TensorDataset(text), batch_size=8, shuffle=True)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
    for _ in range(3):
        for (batch,) in loader:
            step(model, optimizer, batch)
            schedule.step()


if __name__ == "__main__":
    main()
