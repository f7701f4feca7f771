import pytest

from flatout.rules.runtime.restarted_workers import check
from tests.rules.measured import findings_of
from tests.techniques.facts import loader, machine, profile


def known(start_ms, **changes):
    facts = loader(**{"num_workers": 2, "line": "train.py:4"} | changes)
    return profile(loaders=(facts,), epoch_start_ms=start_ms, epoch_steps=10)


def test_starts_that_take_a_part_of_each_epoch_are_found():
    finding = check(known(1000.0), machine())

    assert finding.share == pytest.approx(0.5)
    assert "1.00 s an epoch of 10 steps, 50 % of the time" in finding.because
    assert finding.lines == ("train.py:4",)


@pytest.mark.parametrize(
    "silent",
    [known(40.0), known(1000.0, persistent_workers=True), known(1000.0, num_workers=0)],
    ids=["short", "live on", "no workers"],
)
def test_short_starts_and_workers_that_live_on_are_left_alone(silent):
    assert check(silent, machine()) is None


def test_a_loader_that_is_built_again_ends_the_workers_that_it_wanted_to_keep():
    finding = check(known(1000.0, persistent_workers=True, builds=3), machine())

    assert finding.next.startswith(
        "make the loader once, before the epochs: what persistent_workers"
    )


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 32), torch.randn(64, 1))
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{before}
for epoch in range(10_000):
    {within}
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""
MADE = "loader = DataLoader(data, batch_size=8, num_workers=2{more})"


@pytest.mark.slow
def test_real_workers_that_end_with_each_of_short_epochs_are_found(tmp_path):
    text = SCRIPT.format(before=MADE.format(more=""), within="")
    finding = findings_of(tmp_path, text)["restarted_workers"]

    assert finding.evidence["epoch_steps"] == 8
    assert finding.evidence["epoch_start_ms"] > 0
    assert finding.lines == ("train.py:7",)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", persistent_workers=True"])
def test_a_loader_that_is_made_again_in_each_epoch_is_found(tmp_path, more):
    text = SCRIPT.format(before="", within=MADE.format(more=more))
    finding = findings_of(tmp_path, text)["restarted_workers"]

    assert finding.next.startswith("make the loader once, before the epochs")


@pytest.mark.slow
def test_real_workers_that_live_on_are_not(tmp_path):
    text = SCRIPT.format(before=MADE.format(more=", persistent_workers=True"), within="")

    assert "restarted_workers" not in findings_of(tmp_path, text)
