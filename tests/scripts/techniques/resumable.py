"""Trains some steps, saves all that it takes to go on, and goes on from that with --resume."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--save")
parser.add_argument("--resume", default="")
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=args.fused or None)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
begun = 0
if args.resume:
    saved = torch.load(args.resume, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["random"])
    begun = saved["step"]
for step in range(begun, args.steps):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    labels = torch.randint(4, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    schedule.step()
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
        "step": args.steps,
    },
    args.save,
)
