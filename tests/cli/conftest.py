import json

import pytest

from tests.paths import ROOT

DATA = ROOT / "tests/reporting/data"

TRAIN = """
import sys
import torch

print("arguments", sys.argv[1:])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(200):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("saved.txt", "w").write("done")
"""
CRASH = "import os\nraise ValueError('no data here')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a script that trains and one that fails at once."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "crash.py").write_text(CRASH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def stored():
    """Read a document made by hand for the tests."""
    return lambda name: json.loads((DATA / f"{name}.json").read_text())
