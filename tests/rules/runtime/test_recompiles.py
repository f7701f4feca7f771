import pytest

from flatout.records.readings import CompileFacts
from flatout.rules.runtime.recompiles import check
from tests.rules.measured import findings_of
from tests.techniques.facts import machine, profile

TURNS = {"next": {}}


def known(most):
    made = CompileFacts(
        seconds=9.0,
        recompiles=most,
        recompile_s=6.0,
        most=most,
        place="model.py:12",
        reason="k == 0.5",
    )
    return profile(compiling=made)


def test_the_function_is_named_with_the_reason():
    finding = check(known(3), machine())

    assert finding.because == (
        "the function at model.py:12 was compiled 4 times; compiling again took 6 s; "
        "last because k == 0.5"
    )
    assert finding.share == pytest.approx(0.75)


def test_one_compilation_more_is_on_purpose():
    assert check(known(1), machine()) is None
    assert check(profile(), machine()) is None


SCRIPT = """
import torch
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@torch.compile(backend="eager")
def loss_of(x, kind):
    return model(x).square().mean() if kind else model(x).abs().mean()

for step in range(100_000):
    optimizer.zero_grad()
    loss_of(torch.ones(8, 64), "abcdef"[step % {kinds}]).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_function_that_gets_another_word_in_every_step_is_found(tmp_path):
    finding = findings_of(tmp_path, SCRIPT.format(kinds=6))["recompiles"]

    assert finding.lines[0].startswith("train.py:")
    assert "was compiled 6 times" in finding.because
    assert "kind ==" in finding.because


@pytest.mark.slow
def test_a_function_that_gets_the_same_is_not(tmp_path):
    assert "recompiles" not in findings_of(tmp_path, SCRIPT.format(kinds=1))
