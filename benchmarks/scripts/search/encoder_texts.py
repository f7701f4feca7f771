"""Classify texts of many lengths with an encoder; a tokenizer in plain Python cuts them up."""

import random
import re
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS, BATCH = (32, 1, 2) if "tiny" in sys.argv else (192, 3, 16)
LENGTH = 128
random.seed(0)
WORDS = ["".join(random.choices("abcdefghijklmnop", k=random.randint(2, 9))) for _ in range(4000)]
KNOWN = {word: number + 1 for number, word in enumerate(WORDS)}


class Texts(Dataset):
    def __init__(self):
        self.texts = [
            " ".join(random.choices(WORDS, k=random.randint(8, 120))) for _ in range(4000)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        words = re.findall(r"\w+", self.texts[number].lower())
        tokens = [KNOWN.get(word, 0) for word in words][:LENGTH]
        return torch.tensor(tokens + [0] * (LENGTH - len(tokens))), number % 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(WORDS) + 1, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.1)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        hidden = self.body(self.embed(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, 0])


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(1000):
    for tokens, labels in DataLoader(Texts(), batch_size=BATCH, shuffle=True):
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
