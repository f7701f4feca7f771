"""What the operators of a few steps take on the CPU."""

from types import SimpleNamespace

import pytest

from flatout.agent.probes.operator_times import AFTER, STEPS, own_times
from flatout.analysis.trace import summarise_operators
from flatout.records.trial import Outcome
from tests.support.probed import SCRIPTS, probed


def event(name, own_us=0.0, parent=None):
    return SimpleNamespace(name=name, self_cpu_time_total=own_us, cpu_parent=parent)


def test_the_making_of_batches_and_named_spans_are_no_operators_of_the_step():
    loading = event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500.0)
    stacking = event("aten::stack", 100.0, loading)
    copying = event("aten::cat", 100.0, stacking)
    stepping = event("Optimizer.step#SGD.step", 70.0)
    adding = event("aten::add_", 2000.0, stepping)
    product = event("aten::mm", 6000.0)

    found = own_times([loading, stacking, copying, stepping, adding, product, product])

    assert found == [["aten::add_", 1, 2.0], ["aten::mm", 2, 12.0]]


@pytest.mark.slow
def test_a_real_scripts_operators_are_counted_for_whole_steps():
    trial = probed(
        SCRIPTS / "multiplied.py", "plain", probes={"operator_times": {}}, steps=AFTER + STEPS + 1
    )

    assert trial.outcome is Outcome.OK, trial.traceback
    seen = trial.details["probes"]["operator_times"]
    calls = {name: count for name, count, _ in seen["operators"]}
    assert seen["steps"] == STEPS
    # Two layers forward and one of a part in an evaluation.
    assert calls["aten::addmm"] == 3 * STEPS
    assert all(own_ms >= 0 for _, _, own_ms in seen["operators"])
    assert sum(own_ms for _, _, own_ms in seen["operators"]) <= seen["traced_ms"]


@pytest.mark.slow
def test_looking_changes_no_loss():
    script, steps = SCRIPTS / "multiplied.py", AFTER + STEPS + 1

    watched = probed(script, "plain", probes={"operator_times": {}}, steps=steps)
    plain = probed(script, "plain", probes={}, steps=steps)

    assert watched.profile.losses[:steps] == plain.profile.losses[:steps]


@pytest.mark.slow
def test_what_takes_the_most_is_named_by_module_and_line_forward_and_backward():
    script = SCRIPTS / "dropped.py"
    trial = probed(script, probes={"operator_times": {}}, steps=AFTER + STEPS + 1)

    assert trial.outcome is Outcome.OK, trial.traceback
    found = summarise_operators(trial.details["probes"]["operator_times"])
    (line,) = [
        number
        for number, text in enumerate(script.read_text().splitlines(), 1)
        if "self.drop(" in text
    ]
    # Which of these two takes more is a matter of the machine and of what else runs on it.
    shares = [x.share for x in found.consumers]
    assert shares == sorted(shares, reverse=True)
    assert {x.module for x in found.consumers[:2]} == {"*.drop (Dropout)", "*.mix (Linear)"}
    drop = next(x for x in found.consumers if x.module == "*.drop (Dropout)")
    assert drop.line == f"dropped.py:{line}"
    # Nor which of its operators are among the first.
    assert {x.name for x in drop.operators} & {"aten::bernoulli_", "aten::div_", "aten::mul"}
    assert 0.1 < drop.share <= 1
    # The products of backward belong to the layers that made them forward.
    layers = next(x for x in found.consumers if x.module == "*.mix (Linear)")
    assert {x.name for x in layers.operators} >= {"aten::mm"}
