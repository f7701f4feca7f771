"""What a repository takes from flatout's: the steps of the GitHub action, and the hooks."""

import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT
from tests.support.programs import ran

WRONG = """\
import torch
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward(retain_graph=True)
    optimizer.step()
"""


def fresh_environment(folder):
    """Make an environment that finds this one's packages, so that only flatout is installed."""
    venv.create(folder, with_pip=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(own, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": ""}


@pytest.mark.slow
def test_the_steps_of_the_action_install_flatout_and_annotate_lines(tmp_path):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    given = {name: str(each["default"]) for name, each in action["inputs"].items()}
    given["arguments"] = "--select MEM,SYN"
    environment = fresh_environment(tmp_path / "env") | {"GITHUB_ACTION_PATH": str(ROOT)}
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(WRONG)
    ended = []

    for step in action["runs"]["steps"]:
        filled = {
            name: given[text.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, text in step.get("env", {}).items()
        }
        # As GitHub starts `shell: bash`.
        done = ran(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path / "project",
            env=environment | filled,
        )
        ended.append(done)

    install, check = ended
    assert install.returncode == 0, install.stderr
    assert (tmp_path / "env/bin/flatout").is_file()
    assert check.returncode == 1, check.stderr
    assert check.stdout.startswith("::warning file=train.py,line=4")
    assert "MEM10" in check.stdout


@pytest.mark.parametrize(("text", "code"), [(WRONG, 1), ("import torch\n", 0)])
def test_the_entry_of_each_hook_checks_the_files_that_it_is_given(tmp_path, text, code):
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (tmp_path / "train.py").write_text(text)

    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program == "flatout"
        command = [sys.executable, "-m", program, *arguments, "train.py"]
        done = ran(command, cwd=tmp_path)

        assert done.returncode == code, done.stdout + done.stderr
    assert {hook["id"] for hook in hooks} == {"flatout-check", "flatout-check-installed"}
