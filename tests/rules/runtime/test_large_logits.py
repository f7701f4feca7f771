import pytest

from flatout.records.memory import TensorAtPeak
from flatout.rules.runtime.large_logits import check
from tests.rules.memory_facts import story
from tests.techniques.facts import GIB, gpu, machine, model, profile


def tensor(gib=4, shape=(8, 1024, 50_257), **changes):
    known = {"bytes": gib * GIB, "shape": shape, "dtype": "float32", "line": "", "phase": "forward"}
    return TensorAtPeak(**known | changes)


def facts(*tensors, peak_gib=10, **changes):
    memory = story(peak_bytes=peak_gib * GIB, largest=tensors)
    return profile(memory=memory, models=(model(widest_output=50_257),), **changes)


def test_logits_that_hold_much_of_the_peak_are_reported():
    finding = check(facts(tensor(), tensor(gib=1)), machine())

    assert finding.of == "device"
    assert finding.share == 5 / 16
    assert "50,257 outputs" in finding.because
    assert "50 % of the peak" in finding.because


@pytest.mark.parametrize(
    "known",
    [
        facts(tensor(), peak_gib=14),
        facts(tensor(gib=1), peak_gib=2),
        facts(tensor(shape=(8, 1024, 1024))),
        facts(tensor(kind="parameter")),
        profile(models=(model(widest_output=50_257),)),
        profile(memory=story(largest=(tensor(shape=(4, 10)),)), models=(model(widest_output=10),)),
    ],
    ids=[
        "small part",
        "small on the device",
        "other shape",
        "weights",
        "not looked",
        "no vocabulary",
    ],
)
def test_it_is_silent_about(known):
    assert check(known, machine()) is None


def test_on_a_gpu_its_own_memory_counts():
    assert check(facts(tensor(gib=5), kind="cuda"), machine(device=gpu())) is None
    assert check(facts(tensor(gib=9), peak_gib=20, kind="cuda"), machine(device=gpu())).share > 0.1
