"""The same training, edited for Accelerate and two ranks."""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save", default="weights.pt")
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64 * args.steps, 256), torch.randint(10, (64 * args.steps,)))
model = nn.Sequential(
    nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
)
loader = DataLoader(data, batch_size=64 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ends = []
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    ends.append(time.perf_counter())
first = args.steps // 4
step_ms = 1e3 * (ends[-1] - ends[first]) / (args.steps - first - 1)
accelerator.print(f"{step_ms:.3f} ms a step")
accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)
