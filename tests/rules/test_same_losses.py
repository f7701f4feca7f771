"""A script trains to the same losses after a fix that says so, in a real training on the CPU.

The test module of a rule with a fix says in SAME_LOSSES what makes `training.BASE` its scenario
(a text in it and what replaces that), and with IS_ON_GPU that the rule speaks only where the
training is on a GPU; or in NEW_LOSSES what the fix changes on purpose: no such fix is made unless
it is asked for.
"""

import importlib
import json
import sys

import pytest

from flatout.rules import source
from tests.rules.source.training import BASE
from tests.support.programs import ran

MODULES = {source.code_of(rule): module for rule, module in source.modules().items()}
FIXING = [
    code
    for code, module in MODULES.items()
    if {"safe", "suggested"} & vars(importlib.import_module(module)).keys()
]


def said(code):
    """Return what a rule's own test module says of its fix."""
    _flatout, *folders, rule = MODULES[code].split(".")
    return vars(importlib.import_module(".".join(["tests", *folders, f"test_{rule}"])))


CASES = [code for code in FIXING if "SAME_LOSSES" in said(code)]
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


@pytest.mark.parametrize("code", FIXING)
def test_a_rule_with_a_fix_has_a_case_or_a_reason(code):
    is_safe = hasattr(importlib.import_module(MODULES[code]), "safe")

    assert ("SAME_LOSSES" in said(code)) != bool(said(code).get("NEW_LOSSES"))
    assert not (is_safe and "NEW_LOSSES" in said(code))


def before_of(code):
    old, new = said(code)["SAME_LOSSES"]
    text = BASE.replace(old, new) if old else BASE
    if not said(code).get("IS_ON_GPU"):
        return text
    # A GPU that is named is a CPU when it runs.
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
