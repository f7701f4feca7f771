"""A script trains to the same losses after a fix that says so, in a real training on the CPU."""

import importlib
import json
import subprocess
import sys

import pytest

from flatout.rules import source

BASE = """\
import torch
import torch.utils.checkpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
table = torch.randn(64, 8)
loader = DataLoader(TensorDataset(torch.arange(64), torch.randn(64, 1)), 8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, total = [], 0.0
for epoch in range(3):
    model.train()
    for rows, y in loader:
        x = table[rows]
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
FORWARD = "        loss = mse_loss(model(x), y)\n"
READ = "        losses.append(loss.item())\n"
EVALUATION = "    model.eval()\n    for rows, y in loader:\n        model(table[rows])\n"
CHECKPOINT = "torch.utils.checkpoint.checkpoint"
CASES = {
    "MEM01": (READ, f"{READ}        total += loss\n"),
    "AMP10": (FORWARD, f"        with torch.cpu.amp.autocast():\n    {FORWARD}"),
    "SYN10": (FORWARD, f'        x = x + torch.ones(64, 64).to("cuda")[:8, :8]\n{FORWARD}'),
    "MEM02": (READ, READ + EVALUATION),
    "MEM10": ("loss.backward()", "loss.backward(retain_graph=True)"),
    "MEM11": ("model(x), y", f"{CHECKPOINT}(model[1:], model[0](x), use_reentrant=True), y"),
    "SYN08": ("losses, total", "torch.autograd.set_detect_anomaly(True)\nlosses, total"),
    "DL23": ("x = table[rows]", "x = torch.stack([table[row] for row in rows])"),
}
"""By code what makes the training its scenario. SYN10 names a GPU, which is a CPU when it runs."""
RUN = """
import json, runpy, sys, traceback, warnings
warnings.simplefilter("ignore")
found = {}
for path in sys.argv[1:]:
    try:
        found[path] = [float(loss) for loss in runpy.run_path(path)["losses"]]
    except Exception:
        found[path] = traceback.format_exc()
    finally:
        torch = sys.modules["torch"]
        torch.autograd.set_detect_anomaly(False)
print(json.dumps(found))
"""


def test_every_rule_with_a_safe_fix_has_a_case():
    safe = {
        source.code_of(rule)
        for rule, module in source.modules().items()
        if hasattr(importlib.import_module(module), "safe")
    }

    assert safe <= set(CASES)
    assert len(safe) >= 3


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return the losses of each scenario before and after its fix: one process trains them all."""
    folder = tmp_path_factory.mktemp("fixed")
    for code, (plain, odd) in CASES.items():
        before = BASE.replace(plain, odd)
        after, made = source.fixed_text(before, {code}, suggested=True)
        assert made >= 1, code
        (folder / f"{code}-before.py").write_text(before.replace('"cuda"', '"cpu"'))
        (folder / f"{code}-after.py").write_text(after.replace('"cuda"', '"cpu"'))
    command = [sys.executable, "-c", RUN, *(path.name for path in sorted(folder.iterdir()))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("code", CASES)
def test_the_fixed_script_trains_to_the_same_losses(losses, code):
    before, after = losses[f"{code}-before.py"], losses[f"{code}-after.py"]

    assert isinstance(before, list), before
    assert after == before
    assert len(before) == 24
    assert before[0] != before[-1]
