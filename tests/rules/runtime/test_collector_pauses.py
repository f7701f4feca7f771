import pytest

from flatout.rules.runtime.collector_pauses import check
from tests.rules.measured import findings_of
from tests.techniques.facts import machine, profile

SPEAKS = profile(collection_ms_per_step=5.0)


def test_a_collector_that_takes_a_part_of_each_step_is_found():
    finding = check(SPEAKS, machine())

    assert finding.share == pytest.approx(0.05)
    assert finding.because == "Python's garbage collector takes 5.00 ms of 100 ms (5 %, n=20)"
    assert "flatout tune --only scheduled_gc train.py" in finding.next


@pytest.mark.parametrize("paused_ms", [0.0, 1.9])
def test_it_is_silent_below_a_fiftieth(paused_ms):
    assert check(profile(collection_ms_per_step=paused_ms), machine()) is None


def test_it_is_silent_where_a_device_works_on_in_the_meantime():
    assert check(profile(kind="cuda", collection_ms_per_step=5.0), machine()) is None


SCRIPT = """
import gc
import torch
kept = [[number] for number in range({objects})]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10_000):
    made = [[number] for number in range(2_000)]
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    if {collects}:
        gc.collect()
"""


@pytest.mark.slow
@pytest.mark.measures
def test_a_real_training_with_many_objects_is_found(tmp_path):
    found = findings_of(tmp_path, SCRIPT.format(objects=1_000_000, collects=True))

    assert found["collector_pauses"].share > 0.1


@pytest.mark.slow
def test_a_real_training_without_is_not(tmp_path):
    script = SCRIPT.format(objects=0, collects=False).replace("range(2_000)", "range(2)")

    assert "collector_pauses" not in findings_of(tmp_path, script)
