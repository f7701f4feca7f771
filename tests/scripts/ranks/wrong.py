"""Trainings that cannot be spread: the argument says which."""

import os
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
kind = sys.argv[1]
if kind == "own group":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = tuple(model.parameters()) if kind == "tuple" else ()
if kind == "root and hook":
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
if kind == "one sample":
    model = nn.Sequential(model, nn.BatchNorm1d(2))
samples = 27 if kind == "one sample" else 32
data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 2))


class Unseeded:
    """Batches of samples that are drawn from a generator without a seed."""

    def __init__(self):
        self.dice = np.random.default_rng()

    def __len__(self):
        return 4

    def __iter__(self):
        return (self.dice.permutation(32)[:8].tolist() for _ in range(4))


batches = DataLoader(data, batch_size=8)
if kind == "samplers apart":
    batches = DataLoader(data, batch_sampler=Unseeded())
if kind == "batches apart":
    batches = [data[rows] for rows in Unseeded()]
for x, y in batches:
    out = model(x)
    if kind == "reentrant":
        out = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    if kind == "counts on 8":
        y = y.view(8, 2)
    loss = (out - y).square().mean()
    if kind == "root and hook":
        classes = (y[:, 0] > 0).long()
        some = classes.index_fill(0, torch.arange(3), -100)
        cross_entropy = nn.functional.cross_entropy
        pairs = cross_entropy(out @ out.t(), torch.arange(len(out)))
        loss = loss.sqrt() + cross_entropy(out, classes) + cross_entropy(out, some) + pairs
    if kind == "views":  # SimCLR: the model is called with both of them at once
        views = model(torch.cat((x, x + 0.1)))
        partners = (torch.arange(len(views)) + len(x)) % len(views)
        own = torch.eye(len(views)).bool()
        alike = (views @ views.t()).masked_fill(own, -1e9)
        loss = nn.functional.cross_entropy(alike, partners)
    optimizer.zero_grad()
    loss.backward()
    if kind == "changed apart":
        with torch.no_grad():
            model.weight += torch.rand_like(model.weight)
    optimizer.step()
    if kind == "one fails" and torch.distributed.is_initialized() and torch.distributed.get_rank():
        raise RuntimeError("a disk of this rank is full")
    if kind == "one stops" and torch.distributed.get_rank() == 0 and loss < 3:
        sys.exit()
    print("loss", loss.item(), flush=True)
print("trained to the end", os.getpid())
