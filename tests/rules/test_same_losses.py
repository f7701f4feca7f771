"""A script trains to the same losses after a fix that says so, in a real training on the CPU."""

import importlib
import json
import sys

import pytest

from flatout.rules import source
from tests.support.programs import ran

BASE = """\
import os

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
SAVED = 'PATH = "begin.pt"\ntorch.save(model.state_dict(), PATH)\nmodel.load_state_dict('
RANK = """\
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
LEFT = "torch.distributed.destroy_process_group()\n"
COMPILED = """\
model = torch.compile(model, backend="eager")
torch.save(model.state_dict(), "compiled.pt")
"""
FILES = """\
class Files(TensorDataset):
    def __getitem__(self, index):
        with open(__file__, "rb") as file:
            file.read()
        return super().__getitem__(index)


"""
CASES = {
    "MEM01": (READ, f"{READ}        total += loss\n"),
    "AMP10": (FORWARD, f"        with torch.cpu.amp.autocast():\n    {FORWARD}"),
    "SYN10": (FORWARD, f'        x = x + torch.ones(64, 64).to("cuda")[:8, :8]\n{FORWARD}'),
    "MEM02": (READ, READ + EVALUATION),
    "MEM10": ("loss.backward()", "loss.backward(retain_graph=True)"),
    "MEM11": ("model(x), y", f"{CHECKPOINT}(model[1:], model[0](x), use_reentrant=True), y"),
    "SYN08": ("losses, total", "torch.autograd.set_detect_anomaly(True)\nlosses, total"),
    "SYN01": (READ, f"{READ}        total += loss.item()\n"),
    "SYN03": (READ, f"{READ}        torch.cuda.synchronize()\n"),
    "SYN04": (READ, f"{READ}        torch.cuda.empty_cache()\n"),
    "CK01": (READ, f'{READ}    torch.save(model.state_dict(), "last.pt")\n'),
    "CK07": ("losses, total", f"{SAVED}torch.load(PATH, weights_only=False))\nlosses, total"),
    "MEM13": ("losses, total", f"{RANK}{SAVED}torch.load(PATH))\n{LEFT}losses, total"),
    "CMP05": ("optimizer = ", f"{COMPILED}optimizer = "),
    "DL02": ("loader = DataLoader(TensorDataset(", f"{FILES}loader = DataLoader(Files("),
    "DL03": ("8, shuffle=True", "8, shuffle=True, num_workers=2"),
    "DL04": ("8, shuffle=True", "8, shuffle=True, num_workers=os.cpu_count()"),
    "DL16": ("", ""),
    "DL23": ("x = table[rows]", "x = torch.stack([table[row] for row in rows])"),
}
"""By code what makes the training its scenario. A GPU that is named is a CPU when it runs."""
ON_GPU = frozenset({"SYN01", "SYN03", "SYN04", "DL02", "DL16"})
"""Rules that speak only where the training is on a GPU."""
CHANGE = {
    "AMP02": "products in TF32 have fewer digits",
    "AMP03": "the gradients are clipped at the length that was meant",
    "DL05": "workers that live on draw their seed once, so later epochs have another order",
    "DS04": "each epoch gets an order of its own",
    "LP01": "the loss is divided",
    "LP03": "the gradients are cleared",
    "MEM03": "the epochs after the first train in training mode",
}
"""By code what its fix changes on purpose: none of them is made unless it is asked for."""
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


def test_every_rule_with_a_fix_has_a_case_or_a_reason():
    fixing = {
        code: "safe" if hasattr(module, "safe") else "suggested"
        for rule, name in source.modules().items()
        for code, module in [(source.code_of(rule), importlib.import_module(name))]
        if hasattr(module, "safe") or hasattr(module, "suggested")
    }

    assert set(fixing) == set(CASES) | set(CHANGE)
    assert not set(CASES) & set(CHANGE)
    assert not {code for code in CHANGE if fixing[code] == "safe"}


def before_of(code):
    text = BASE.replace(*CASES[code]) if any(CASES[code]) else BASE
    if code not in ON_GPU:
        return text
    text = text.replace("x = table[rows]", 'x, y = table[rows].to("cuda"), y.to("cuda")')
    return text.replace("optimizer = ", 'model.to("cuda")\noptimizer = ')


def on_cpu(text):
    return text.replace('"cuda"', '"cpu"').replace("cuda.synchronize", "cpu.synchronize")


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return the losses of each scenario before and after its fix: one process trains them all."""
    folder = tmp_path_factory.mktemp("fixed")
    for code in CASES:
        before = before_of(code)
        after, made = source.fixed_text(before, {code}, suggested=True)
        assert made >= 1, code
        (folder / f"{code}-before.py").write_text(on_cpu(before))
        (folder / f"{code}-after.py").write_text(on_cpu(after))
    command = [sys.executable, "-c", RUN, *(path.name for path in sorted(folder.iterdir()))]
    done = ran(command, cwd=folder, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("code", CASES)
def test_the_fixed_script_trains_to_the_same_losses(losses, code):
    before, after = losses[f"{code}-before.py"], losses[f"{code}-after.py"]

    assert isinstance(before, list), before
    assert after == before
    assert len(before) == 24
    assert before[0] != before[-1]
