"""Data that cost 100 ms a batch and a step that takes 100 ms; `--free` takes the data's cost away.

The cost is large against what a busy machine adds. Scenarios: `sleep` in the loop's own process,
`no_loader` with batches of the script's own.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SCENARIO, IS_FREE = sys.argv[1], "--free" in sys.argv
BATCH = 8
MADE_IN_S = {"sleep": 0.1, "no_loader": 0.0}[SCENARIO]


class Rows(Dataset):
    """Gives whole batches: one wait for each is surer than many short ones."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if not IS_FREE:
            time.sleep(MADE_IN_S)
        return {"x": torch.full((BATCH, 64), index / 400), "y": torch.arange(BATCH) % 4}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x):
        time.sleep(0.1)
        return self.layers(x)


def batches():
    if SCENARIO == "no_loader":
        return [Rows()[0]] * 400
    return DataLoader(Rows(), batch_size=None)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other suffer most from other work
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches()
    for _ in range(20):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
