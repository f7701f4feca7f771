import sys
from dataclasses import replace

import pytest
import torch

from flatout.agent.recorder import environment_facts
from flatout.hardware.machine import read_machine
from flatout.records.messages import messages
from flatout.records.trial import Workload
from flatout.rules.runtime.unused_gpu import check
from flatout.workflow.measure import measure
from tests.techniques.facts import gpu, machine, profile


def test_a_model_on_the_cpu_beside_a_gpu_is_reported_with_what_it_computes():
    finding = check(profile(phases_ms={"data_wait": 25.0}), machine(devices=(gpu(),)))

    assert finding.share == 0.8
    assert finding.is_bound
    assert finding.because == (
        "100 ms of 125 ms (80 %, n=20) are computed on the CPU, and a GPU is not used"
    )
    assert '.to("cuda")' in finding.next


@pytest.mark.parametrize(("kind", "name"), [("rocm", "cuda"), ("mps", "mps")])
def test_a_device_is_called_as_torch_calls_it(kind, name):
    finding = check(profile(), machine(devices=(gpu(kind=kind),)))

    assert f'.to("{name}")' in finding.next


@pytest.mark.parametrize(
    ("facts", "host"),
    [
        (profile(), machine()),
        (profile(kind="cuda"), machine(devices=(gpu(),))),
        (profile(phases_ms={"data_wait": 900.0}), machine(devices=(gpu(),))),
        (profile(phases_ms={"forward": 5.0, "backward": 10.0}), machine(devices=(gpu(),))),
    ],
    ids=["no GPU", "on the GPU", "waits for data", "a small model"],
)
def test_it_is_silent_where_a_gpu_could_not_help(facts, host):
    assert check(facts, host) is None


def barred_by(cause):
    return check(profile(environment={"gpu_barred_by": cause}), machine(devices=(gpu(),)))


def test_a_variable_that_the_script_sets_is_the_cause():
    finding = barred_by("HIP_VISIBLE_DEVICES")

    assert "the script sets HIP_VISIBLE_DEVICES" in finding.because
    assert "HIP_VISIBLE_DEVICES" in finding.next
    assert "스크립트가 HIP_VISIBLE_DEVICES를" in messages("ko").text(finding.because)


def test_a_process_that_was_forked_too_late_is_the_cause(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)

    finding = barred_by(environment_facts()["gpu_barred_by"])

    assert "was forked after CUDA had been started" in finding.because
    assert 'set_start_method("spawn")' in finding.next


SCRIPT = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(1000, 4000, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10_000):
    optimizer.zero_grad()
    model(torch.randn(500, 1000, device=device)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_hides_the_gpu_from_itself_is_found(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    here = replace(read_machine(torch=False), devices=(gpu(),))
    workload = Workload(target="train.py", folder=tmp_path, python=sys.executable)

    trial = measure(workload, machine=here)

    (found,) = [each for each in trial.profile.findings if each.code == "unused_gpu"]
    assert "the script sets CUDA_VISIBLE_DEVICES" in found.because
