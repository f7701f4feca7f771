"""Save a model that a technique changed, and load it in a process without flatout."""

import torch

from tests.support.programs import python

LOAD = """
import sys, torch
folder = sys.argv[1]
net = torch.load(f"{folder}/model.pt", weights_only=False)
given, expected = torch.load(f"{folder}/call.pt")
print(torch.allclose(net(given), expected))
print([name for name in sys.modules if name.startswith("flatout")])
"""


def assert_loads_alone(changed, plain, given, folder):
    """Make sure that a changed model, saved whole, computes as the plain one, without flatout."""
    torch.save(changed, folder / "model.pt")
    torch.save((given, plain(given)), folder / "call.pt")

    done = python(["-c", LOAD, folder])

    assert done.stdout.split("\n")[:2] == ["True", "[]"], done.stderr
