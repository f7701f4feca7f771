import pytest

from flatout.records.messages import messages
from flatout.reporting.profile.sentences import headline
from flatout.rules import add_findings
from flatout.rules.runtime.long_evaluation import check
from tests.rules.measured import findings_of
from tests.techniques.facts import machine, profile


def test_evaluation_that_takes_most_of_the_run_is_named():
    finding = check(profile(eval_share=0.74), machine())

    assert (finding.share, finding.of, finding.is_bound) == (0.74, "run", False)
    assert finding.because == (
        "Evaluation takes 74 % of the run: a faster training step shortens only the rest"
    )


@pytest.mark.parametrize(("share", "leads"), [(0.74, True), (0.4, False)])
def test_it_is_the_first_line_where_it_takes_more_than_the_training(share, leads):
    facts = profile(eval_share=share, phases_ms={"data_wait": 60.0, "forward": 40.0})

    line = messages("en").text(headline(add_findings(facts, machine())))

    assert ("Evaluation takes" in line) is leads


@pytest.mark.parametrize("silent", [profile(), profile(eval_share=0.2)], ids=["none", "short"])
def test_it_is_silent_where_the_training_takes_the_time(silent):
    assert check(silent, machine()) is None


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def made(count):
    return TensorDataset(torch.randn(count, 128), torch.randn(count, 1))
training = DataLoader(made(160), batch_size=16)
held_out = DataLoader(made({held_out}), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(10_000):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            model(x)
"""


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_training_that_mostly_evaluates_is_told_so(tmp_path):
    found = findings_of(tmp_path, SCRIPT.format(held_out=32_000))

    assert found["long_evaluation"].share > 0.5


@pytest.mark.slow
def test_a_real_training_that_seldom_evaluates_is_not(tmp_path):
    assert "long_evaluation" not in findings_of(tmp_path, SCRIPT.format(held_out=32))
