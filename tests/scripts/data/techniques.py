"""Trains a small network from files, tensors or texts, for trials of the loader's techniques."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

kind, workers = sys.argv[1], int(sys.argv[2])
epochs = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
torch.manual_seed(0)


class Pictures(Dataset):
    def __init__(self, folder):
        self.paths = []
        generator = np.random.default_rng(0)
        for number in range(64):
            pixels = generator.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            place = folder / str(number // 16) if kind == "sorted" else folder
            place.mkdir(exist_ok=True)
            self.paths.append(place / f"{number:02}.jpg")
            Image.fromarray(pixels).save(self.paths[-1])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB").resize((8, 8))
        x = torch.from_numpy(np.array(image)).float().flatten() / 255
        if kind == "flipped" and torch.rand(()) < 0.5:
            x = x.flip(0)
        return x, index % 4


class Tokenizer:
    def get_vocab(self):
        return {"word": 1}

    def __call__(self, index):
        mask = torch.zeros(192, dtype=torch.int64)
        mask[: 1 + index % 50] = 1
        return {"input_ids": mask * index, "attention_mask": mask, "y": index % 4}


class Texts(Dataset):
    def __init__(self):
        self.tokenizer = Tokenizer()

    def __len__(self):
        return 256

    def __getitem__(self, index):
        return self.tokenizer(index)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(512, 16, mode="sum")
        self.head = nn.Linear(16, 4)

    def forward(self, input_ids, attention_mask):
        return self.head(self.table(input_ids, per_sample_weights=attention_mask.float()))


def parts_of(batch):
    if isinstance(batch, dict):
        return {k: batch[k] for k in ("input_ids", "attention_mask")}, batch["y"]
    return {"input": batch[0]}, batch[1]


def main(folder):
    if kind == "texts":
        dataset, model = Texts(), Bag()
    elif kind == "tensors":
        dataset = TensorDataset(torch.randn(256, 192), torch.arange(256) % 4)
        model = nn.Linear(192, 4)
    else:
        dataset, model = Pictures(folder), nn.Linear(192, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    for _ in range(epochs):
        for batch in loader:
            inputs, y = parts_of(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(**inputs), y).backward()
            optimizer.step()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
