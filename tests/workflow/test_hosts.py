"""A training on several hosts: the batch script for SLURM, run by a made-up srun, and errors."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.cli.run import without_options
from flatout.records.errors import UserError
from flatout.workflow.hosts import Hosts, slurm_script

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.ones(16, 1))
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
print(f"loss {loss.item():.6f}")
"""
SRUN = """#!/bin/bash
# Two hosts on this machine: the command is started twice, at the same time, in folders apart.
for host in 0 1; do
  (mkdir -p "host$host" && cp train.py "host$host" && cd "host$host" && "$@") &
done
wait -n && wait
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\nseq 100000\n"
"""With more hosts than a pipe holds, of which only the first is read."""


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_batch_script_is_valid_and_names_the_first_host(tmp_path):
    path = tmp_path / "job.sh"

    path.write_text(slurm_script("my train.py", 2, 8, ["flatout", "run", "--gpus", "8", "a b.py"]))

    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert "#SBATCH --job-name=my-train" in lines
    assert "#SBATCH --gpus-per-node=8" in lines
    assert lines[-1] == "srun flatout run --hosts 2 --rendezvous \"$first:29500\" --gpus 8 'a b.py'"


def test_one_host_needs_no_rendezvous():
    script = slurm_script("train.py", 1, None, ["flatout", "run", "--ranks", "2", "train.py"])

    assert script.endswith("srun flatout run --ranks 2 train.py\n")
    assert "gpus" not in script


def test_the_script_keeps_its_own_options():
    words = ["run", "--hosts=2", "--slurm", "j.sh", "--gpus", "8", "t.py", "--slurm", "x"]

    found = without_options(words, ("--slurm", "--hosts", "--rendezvous"), "t.py")

    assert found == ["run", "--gpus", "8", "t.py", "--slurm", "x"]


@pytest.mark.parametrize("rendezvous", ["", "node1", ":29500"])
def test_hosts_have_to_find_each_other(rendezvous):
    with pytest.raises(UserError, match="HOST:PORT"):
        Hosts(count=2, rendezvous=rendezvous)


@pytest.mark.slow
def test_the_batch_script_trains_on_two_hosts_like_one_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    executable(tmp_path / "srun", SRUN)
    executable(tmp_path / "scontrol", SCONTROL)
    home = Path(sys.executable).parent
    path = f"{tmp_path}:{home}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_NODELIST": "made up"}
    given = {"cwd": tmp_path, "env": environment, "text": True, "timeout": 300}
    flatout = str(home / "flatout")
    alone = subprocess.run(
        [sys.executable, "train.py"], check=True, capture_output=True, **given
    ).stdout

    written = [flatout, "run", "--slurm", "job.sh", "--ranks", "1", "--hosts", "2", "train.py"]
    subprocess.run(written, check=True, capture_output=True, **given)
    together = subprocess.run(["bash", "job.sh"], capture_output=True, check=False, **given)

    assert together.returncode == 0, together.stderr
    assert together.stdout.count(alone) == 1  # rank 0 alone prints
