"""A technique and rules of both kinds come in as three new files each, and nothing else is edited.

They are put into a copy of the project, in which the tests then run that look at all of them.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT

NEW = ROOT / "tests/scripts/plug_ins"
PLACES = {
    "technique.py": "src/flatout/techniques/compute/flush_denormals.py",
    "technique_test.py": "tests/techniques/compute/test_flush_denormals.py",
    "technique.md": "docs/techniques/compute/flush_denormals.md",
    "source_rule.py": "src/flatout/rules/source/loop/lp13_zeroed_gradients.py",
    "source_rule_test.py": "tests/rules/source/loop/test_lp13_zeroed_gradients.py",
    "source_rule.md": "docs/rules/lp13_zeroed_gradients.md",
    "profile_rule.py": "src/flatout/rules/runtime/uneven_steps.py",
    "profile_rule_test.py": "tests/rules/runtime/test_uneven_steps.py",
    "profile_rule.md": "docs/rules/uneven_steps.md",
}
LOOKING_AT_ALL = (
    *("tests/test_structure.py", "tests/test_budgets.py", "tests/test_contract.py"),
    *("tests/test_docs.py", "tests/test_words.py", "tests/test_site.py"),
    *("tests/test_public_api.py", "tests/test_mutable_globals.py"),
    *("tests/rules/test_init.py", "tests/rules/test_on_an_h200.py"),
    *("tests/rules/test_same_losses.py", "tests/rules/source/test_init.py"),
    *("tests/techniques/test_korean.py", "tests/techniques/test_promises.py"),
    *("tests/cli/test_korean.py", "tests/cli/test_rules.py", "tests/cli/test_techniques.py"),
    *("tests/reporting/test_messages.py", "tests/records"),
)


@pytest.mark.slow
def test_three_new_files_each_are_all_that_a_technique_and_two_rules_need(tmp_path):
    copy = tmp_path / "flatout"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "flatout-out")
    shutil.copytree(ROOT, copy, ignore=left_out)
    subprocess.run(["git", "init", "-q", copy], check=True)
    for name, place in PLACES.items():
        assert not (copy / place).exists()
        shutil.copy(NEW / name, copy / place)
    own = [place for place in PLACES.values() if place.startswith("tests/")]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *own, *LOOKING_AT_ALL],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-5_000:]
