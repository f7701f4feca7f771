"""Samples from a stream, gradients accumulated, and a BatchNorm-free convolution."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        for i in range(number, 60, count):
            generator = torch.Generator().manual_seed(i)
            yield {"x": torch.randn(3, 6, 6, generator=generator), "y": i % 4, "name": str(i)}


if __name__ == "__main__":
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Stream(), batch_size=8, num_workers=2)
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert len(batch["name"]) == len(batch["x"])
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            print("loss", loss.item())
    torch.save({"model": model.state_dict()}, "ck.pt")
