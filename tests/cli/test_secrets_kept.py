"""No command leaves a secret of the script's command line in what it prints or stores."""

import os
import subprocess
import sys

import pytest

from flatout.records.secrets import HIDDEN

TRAIN = """
import flatout
import os, sys
if len(sys.argv) > 6:
    flatout.apply("recipe.toml")
from flatout.callbacks import MeasuredTraining
measured = MeasuredTraining()
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(60):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
measured.conclude()
if len(sys.argv) > 6:
    for folder, _, names in os.walk(os.environ["XDG_CACHE_HOME"]):
        print("job", *(open(f"{folder}/{name}").read() for name in names if name == "job.json"))
"""
RECIPE = "[flatout]\nversion = '{version}'\n[[technique]]\nname = 'cpu_threads'\nthreads = 1\n"
SECRET = "hunter2"
SHAPED = "ghp_" + "aB1" * 12
WORDS = ["--token", SECRET, f"--api-key={SECRET}", f"wandb.password={SECRET}", "--x", SHAPED]
COMMANDS = {
    "measure": ["-m", "flatout", "measure", "--quick", "--json", "m.json", "--html", "m.html"],
    "tune": ["-m", "flatout", "tune", "--budget", "20s", "--accept-load", "--out", "out"],
    "survey": ["-m", "flatout", "survey", "--budget", "5s", "--accept-load", "--json", "s.json"],
    "plan": ["-m", "flatout", "plan", "--gpu", "24GiB", "--json", "p.json", "--html", "p.html"],
    "run": ["-m", "flatout", "run", "--with", "recipe.toml"],
    "apply": [],
}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_stores_or_shows_a_secret_of_the_command_line(tmp_path, name):
    from flatout import __version__

    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    (work / "recipe.toml").write_text(RECIPE.format(version=__version__))
    more = ["--apply"] if name == "apply" else []

    done = subprocess.run(
        [sys.executable, *COMMANDS[name], "train.py", *WORDS, *more],
        cwd=work,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        check=False,
    )
    places = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    places |= {"stdout": done.stdout, "stderr": done.stderr}

    assert done.returncode in (0, 1), done.stderr
    assert any(HIDDEN.encode() in data for data in places.values())
    leaks = [
        place
        for place, data in places.items()
        if SECRET.encode() in data or SHAPED.encode() in data
    ]
    assert leaks == []
