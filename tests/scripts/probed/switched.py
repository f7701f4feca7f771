"""Trainings of several shapes, for screens: python switched.py KIND STEPS."""

import sys
import time

import torch

kind, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


def network(width=16):
    return torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    )


model, critic = network(), network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=False)
other = torch.optim.Adam(critic.parameters(), lr=1e-3)


def plain():
    loss = model(torch.randn(4, 8)).square().mean()
    if kind == "breaks" and optimizer.param_groups[0]["fused"]:
        raise RuntimeError("this script does not like it")
    if kind == "ruined" and optimizer.param_groups[0]["fused"]:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)


def adversarial():
    for _ in range(2):
        critic_loss = critic(torch.randn(4, 8)).square().mean()
        other.zero_grad()
        critic_loss.backward()
        other.step()
        time.sleep(0.001)
    plain()


def accumulating():
    optimizer.zero_grad()
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)


step = {"gan": adversarial, "accumulating": accumulating}.get(kind, plain)
for number in range(steps):
    step()
    if kind == "evaluating" and number % 100 == 99:
        model.eval()
        with torch.no_grad():
            model(torch.randn(64, 8))
        time.sleep(0.05)
        model.train()
