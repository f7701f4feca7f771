import pytest

from flatout.records.readings import CompileFacts
from flatout.rules.runtime.compile_cost import check
from tests.rules.measured import findings_of
from tests.techniques.facts import machine, profile

TURNS = {"next": {"compile": "less"}}


def known(steps):
    return profile(compiling=CompileFacts(seconds=30.0), planned_steps=steps)


def test_a_training_that_is_shorter_than_its_compiling_is_found():
    finding = check(known(100.0), machine())

    assert finding.because == (
        "compiling took 30 s, and all 100 steps of this training take 10 s: it pays back only "
        "where a step without it takes more than 4.00x as long"
    )
    assert finding.share == pytest.approx(0.75)
    assert finding.of == "training"


def test_it_is_silent_about_long_trainings_and_where_the_length_is_not_known():
    assert check(known(1000.0), machine()) is None
    assert check(known(None), machine()) is None
    assert check(profile(planned_steps=10.0), machine()) is None


SCRIPT = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(30)))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(steps):
    optimizer.zero_grad()
    compiled(torch.ones(8, 32)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_training_of_few_steps_is_found(tmp_path):
    finding = findings_of(tmp_path, SCRIPT, "--steps", "60")["compile_cost"]

    assert finding.evidence["steps"] == 60
    assert finding.evidence["compile_s"] > finding.evidence["training_s"] > 0


@pytest.mark.slow
def test_the_same_training_of_many_steps_is_not(tmp_path):
    assert "compile_cost" not in findings_of(tmp_path, SCRIPT, "--steps", "10000000")
