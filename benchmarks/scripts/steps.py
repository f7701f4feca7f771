"""Train a small network on made-up vectors: steps of some milliseconds, as short as jobs get.

python steps.py --width 256 --layers 3 --steps 1000
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main():
    """Train until the steps are made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    inputs = torch.randn(64 * args.batch_size, args.width)
    loader = DataLoader(
        TensorDataset(inputs, inputs[:, 0].gt(0).long()), args.batch_size, shuffle=True
    )
    layers = [
        layer
        for _ in range(args.layers)
        for layer in (nn.Linear(args.width, args.width), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Linear(args.width, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while step < args.steps:
        for x, y in loader:
            loss = functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
