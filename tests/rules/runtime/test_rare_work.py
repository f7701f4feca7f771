import pytest

from flatout.records.messages import messages
from flatout.records.profile import RareWork
from flatout.reporting.profile.sentences import headline
from flatout.rules import add_findings
from flatout.rules.runtime.rare_work import check
from tests.rules.measured import findings_of
from tests.techniques.facts import machine, profile


def rare(share, saving_share=0.0, waiting_share=0.0):
    work = RareWork(
        share=share,
        ms=215.0,
        steps=5,
        of_steps=26,
        saving_share=saving_share,
        waiting_share=waiting_share,
    )
    return profile(rare=work)


def test_what_some_steps_do_is_said_with_how_often():
    finding = check(rare(0.9), machine())

    assert finding.because.startswith("90 % of the run is work of 5 in 26 steps only, 215 ms each")
    assert (finding.of, finding.is_bound) == ("run", False)


def test_saving_is_called_so():
    assert check(rare(0.5, saving_share=0.9), machine()).because.startswith(
        "50 % of the run is saving, in 5 of 26 steps"
    )


def test_waiting_for_a_shard_is_called_so():
    finding = check(rare(0.8, waiting_share=0.9), machine())

    assert finding.because.startswith("80 % of the run is waiting for the batch of 5 in 26 steps")
    assert "read it ahead" in finding.next


@pytest.mark.parametrize(("share", "leads"), [(0.9, True), (0.3, False)])
def test_it_is_the_first_line_where_it_takes_most_of_the_run(share, leads):
    line = messages("en").text(headline(add_findings(rare(share), machine())))

    assert ("of the run is work" in line) is leads


@pytest.mark.parametrize("silent", [profile(), rare(0.05)], ids=["none", "little"])
def test_it_is_silent_where_all_steps_are_alike(silent):
    assert check(silent, machine()) is None


SCRIPT = """
import time
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    if step % 5 == 0:
        {work}
"""


@pytest.mark.measures
@pytest.mark.slow
def test_a_real_loop_that_draws_every_fifth_step_is_found(tmp_path):
    found = findings_of(tmp_path, SCRIPT.format(work="time.sleep(0.2)"))["rare_work"]

    # Five usual steps would have to take 200 ms to halve it.
    assert found.share > 0.5
    assert found.evidence["ms"] > 150
    assert found.evidence["of_steps"] / found.evidence["steps"] == pytest.approx(5, rel=0.4)


@pytest.mark.measures
@pytest.mark.slow
def test_a_real_loop_that_saves_every_fifth_step_is_found(tmp_path):
    work = "torch.save(torch.zeros(20_000_000), 'weights.pt')"

    found = findings_of(tmp_path, SCRIPT.format(work=work))["rare_work"]

    assert "is saving" in found.because


@pytest.mark.measures
@pytest.mark.slow
def test_a_real_loop_of_equal_steps_has_none(tmp_path):
    assert "rare_work" not in findings_of(tmp_path, SCRIPT.format(work="pass"))


STREAM = """
import time
import torch
class Shards(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(100_000):
            if number % (10 * 32) == 0:
                time.sleep(0.2)
            yield torch.ones(64)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(Shards(), batch_size=32):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.measures
@pytest.mark.slow
def test_a_real_stream_that_stops_at_each_shard_is_found(tmp_path):
    found = findings_of(tmp_path, STREAM)["rare_work"]

    assert "is waiting for the batch" in found.because
    assert found.share > 0.5
