import pytest

from flatout.agent.probes.syncs import DEVICE_CALLS, METHODS, OPERATORS
from flatout.records.readings import IdleSplit, TraceSummary
from flatout.rules.runtime.sync_in_step import ADVICE, check
from tests.rules.memory_facts import sync
from tests.techniques.facts import machine, profile


def test_costly_waits_are_reported_with_their_lines():
    waits = (
        sync(ms_per_step=4.0),
        sync(line="train.py:12", what="print", per_step=0.1, ms_per_step=6.0),
    )

    finding = check(profile(syncs=waits), machine())

    assert finding.share == 0.1
    assert finding.because == (
        "calls that read values of tensors take about 10.0 ms of 100 ms (10 %): "
        "train.py:12 (print, 0.1 a step), train.py:9 (item, 1 a step)"
    )


def test_it_is_silent_below_three_percent():
    assert check(profile(syncs=(sync(ms_per_step=2.9),)), machine()) is None


def test_calls_that_cost_nothing_are_no_finding():
    assert check(profile(syncs=(sync(ms_per_step=None),) * 50), machine()) is None


def test_waits_never_exceed_the_step():
    assert check(profile(syncs=(sync(ms_per_step=500.0),)), machine()).share == 1.0


def test_waits_for_a_busy_device_cost_nothing():
    waits = (sync(ms_per_step=90.0),)

    assert check(profile(kind="cuda", device_busy_share=0.98, syncs=waits), machine()) is None


def test_waits_cost_at_most_what_the_device_was_idle():
    waits = (sync(ms_per_step=90.0),)

    finding = check(profile(kind="cuda", device_busy_share=0.75, syncs=waits), machine())

    assert finding.share == pytest.approx(0.25)
    assert finding.because.startswith(
        "calls in which the host waits cost up to 25.0 ms of 100 ms (25 %): train.py:9"
    )
    assert finding.evidence["wait_ms"] == 90.0


def test_a_trace_that_saw_the_device_busy_counts_too():
    idle = IdleSplit(host_wait_share=0.01, kernel_wait_share=0.0, other_share=0.0)
    trace = TraceSummary(steps=3, step_ms=100.0, idle=idle)
    waits = (sync(ms_per_step=90.0),)

    facts = profile(kind="cuda", device_busy_share=0.5, syncs=waits, trace=trace)

    assert check(facts, machine()) is None


def advice(what):
    return check(profile(syncs=(sync(what=what),)), machine()).next


def test_every_wait_that_is_watched_has_its_advice():
    assert set(ADVICE) == {*METHODS.values(), *DEVICE_CALLS, *OPERATORS.values()}


@pytest.mark.parametrize("what", ["item", "float", "print", "tolist"])
def test_values_for_a_log_may_be_read_more_seldom(what):
    assert "a log or a metric" in advice(what)
    assert "tenth step" in advice(what)


@pytest.mark.parametrize("what", ["boolean index", "nonzero", "masked_select", "unique"])
def test_indexes_are_not_to_be_skipped_but_written_otherwise(what):
    assert "torch.where" in advice(what)
    assert "tenth step" not in advice(what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("to cpu", "non_blocking=True"),
        ("numpy", "non_blocking=True"),
        ("bool", "decide on the device"),
        ("synchronize", "out of the loop"),
        ("empty_cache", "out of the loop"),
    ],
)
def test_what_the_step_needs_is_not_to_be_skipped(what, said):
    assert said in advice(what)
    assert "tenth step" not in advice(what)


def test_the_advice_is_about_the_costliest_line():
    waits = (sync(ms_per_step=4.0), sync(what="nonzero", ms_per_step=6.0))

    assert "torch.where" in check(profile(syncs=waits), machine()).next
