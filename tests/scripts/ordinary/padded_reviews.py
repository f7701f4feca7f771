"""Classify reviews of very different lengths, all padded to 256 tokens."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MAX_LEN, PAD = 256, 0


class Reviews(Dataset):
    def __init__(self, n=2000):
        rng = random.Random(0)
        self.rows = [
            [rng.randrange(1, 5000) for _ in range(rng.choice([12, 20, 30, 40, 240]))]
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.rows[i][:MAX_LEN]
        mask = [1] * len(ids) + [0] * (MAX_LEN - len(ids))
        ids = ids + [PAD] * (MAX_LEN - len(ids))
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "label": torch.tensor(i % 2),
        }


class Classifier(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(5000, dim, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 2)

    def forward(self, input_ids, attention_mask):
        x = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.out(x[:, 0])


model = Classifier()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(Reviews(), batch_size=16, shuffle=True)
for _ in range(3):
    for batch in loader:
        label = batch.pop("label")
        loss = nn.functional.cross_entropy(model(**batch), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
