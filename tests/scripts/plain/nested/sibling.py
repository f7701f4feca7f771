"""Imported by its neighbour."""

from torch import nn


def make_model(width):
    return nn.Linear(width, 1)
