"""Random augmentation in workers and dropout: each rank writes its draws to a file."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(13)


class Noisy(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=int(sys.argv[1]))
    seen = []
    for epoch in range(3):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch:
                seen.append(batch.tolist())
    name = f"{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.pt"
    torch.save(seen, Path(sys.argv[2]) / name)
