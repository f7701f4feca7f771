"""All that flatout replaces in torch and other libraries: in one place, listed, and put back."""

import ast
import json
import subprocess
import sys

from tests.paths import ROOT

SOURCE = ROOT / "src/flatout"
PLACE = "agent/patching.py"
ASSIGNED = {
    # Settings of torch, which a technique or a measurement is about: values, not code.
    ("agent/guard/pinning.py", "config.fallback_random"),
    ("techniques/compute/cudnn_autotune.py", "torch.backends.cudnn.benchmark"),
    ("techniques/compute/cudnn_autotune.py", "cudnn.benchmark"),
    ("techniques/precision/tf32.py", "torch.backends.cuda.matmul.fp32_precision"),
    ("workflow/products_alone.py", "torch.backends.cudnn.allow_tf32"),
    ("techniques/data/worker_threads.py", "os.environ"),
    # Of one object, which lives no longer than what it is for.
    ("agent/measuring/operators.py", "setattr session"),
    ("agent/worker_start.py", "setattr context"),
    ("techniques/optimizer/offloaded_optimizer/host_steps.py", "setattr optimizer"),
    ("agent/bootstrap.py", "spec.loader.exec_module"),
    ("agent/measuring/batch_timer.py", "fetcher.collate_fn"),
    ("data/proof/random_streams.py", "fetcher.fetch"),
    # A mark on flatout's own wrapper.
    ("data/proof/aliases.py", "setattr entered"),
    # A class of flatout's own.
    ("data/byte_batches/arrays.py", "setattr LazyArray"),
}
"""What is assigned elsewhere. This list may only become shorter."""
SCRIPT = """
import json
import torch, torch.distributed
from flatout.agent import bootstrap, patching
from flatout.agent.guard import pinning
from flatout.agent.hooks import collectives, loader, model, optimizer, step
from flatout.agent.measuring import batch_timer, kernels, operators
from flatout.agent.session import Session
from flatout.data.byte_batches import transport
from flatout.records.trial_spec import TrialSpec

session = Session(TrialSpec(mode="measure", folder=""))
for hook in (loader, model, optimizer, step, collectives):
    hook.install(session)
transport.install()
batch_timer.install(session, lambda: None)
operators.CopyTimer(lambda *_: None).install()
kernels.watch()
pinning.pin_samples(0)
pinning.drop_dropout()
found = [[str(patch), int(patch.order)] for patch in patching.patches()]
put = {(patch.owner, patch.name): vars(patch.owner)[patch.name] for patch in patching.patches()}
made = list(patching.patches())
for patch in [*made[::2], *made[1::2]]:  # out of order
    patch.undo()
left = [str(patch) for patch in patching.patches()]
left += [name for (owner, name), value in put.items() if vars(owner).get(name) is value]
left += [
    name
    for (owner, name) in put
    if str(getattr(getattr(owner, name), "__code__", "")).count("flatout")
]
print(json.dumps([found, left]))
"""


def roots_of(tree):
    """Return the names that stand for something of another package in a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("flatout"):
            found |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):  # `kind = torch.optim.Optimizer`
        value = getattr(node, "value", None)
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if root_of(value) in found:
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def root_of(node):
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assigned_in(tree):
    """Yield what a module sets on objects that are not its own."""
    foreign = roots_of(tree)
    local = {
        inner.name
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield f"{node.func.id} {ast.unparse(node.args[0])}"
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            continue
        value = getattr(node, "value", None)
        is_wrapper = isinstance(value, ast.Name) and value.id in local
        flat = [each for one in targets for each in getattr(one, "elts", [one])]
        for target in flat:
            root = root_of(target) if isinstance(target, ast.Attribute) else ""
            if root in foreign or (is_wrapper and root not in ("", "self", *MODULES)):
                yield ast.unparse(target)


MODULES = ("module", "layer", "optimizer", "swap")
"""Objects of the script's model and optimizer, and of flatout's own, that are given a method."""


def test_nothing_is_patched_elsewhere():
    found = {
        (path.relative_to(SOURCE).as_posix(), what)
        for path in SOURCE.rglob("*.py")
        for what in assigned_in(ast.parse(path.read_text()))
    }

    assert {(path, what) for path, what in found if path != PLACE} == ASSIGNED


def test_patches_are_in_their_order_and_undone_out_of_order_leave_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    found, left = json.loads(done.stdout.splitlines()[-1])

    assert left == []
    fetch = [
        name.partition(" by flatout.")[2] for name, _ in found if "MapDatasetFetcher.f" in name
    ]
    assert fetch == [
        "agent.guard.pinning",
        "agent.measuring.batch_timer",
        "data.byte_batches.transport",
    ]
    names = {name.partition(" by ")[0] for name, _ in found}
    assert names >= {
        "DataLoader.__init__",
        "DataLoader.__iter__",
        "_BaseDataLoaderIter.__next__",
        "Module.__call__",
        "Optimizer.__init__",
        "torch.autograd.backward",
        "torch.autograd.grad",
        "GradScaler.scale",
        "torch.save",
        "torch.distributed.all_reduce",
        "Work.wait",
        "Tensor.to",
        "torch.nn.functional.dropout",
    }
