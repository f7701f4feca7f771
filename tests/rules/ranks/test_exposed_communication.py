import pytest

from flatout.records.readings import TraceSummary
from flatout.rules.ranks.exposed_communication import check
from tests.rules.rank_facts import rank
from tests.techniques.facts import machine, profile

TURNS = {"next": {"batch": "larger"}}


def test_the_rank_that_waits_least_tells_what_communication_costs():
    ranks = (rank(0, exposed_ms=70.0), rank(1, exposed_ms=30.0))

    finding = check(profile(ranks=ranks), machine())

    assert finding.share == pytest.approx(0.3)
    assert finding.because == (
        "30.0 ms of 100 ms (30 %) pass in communication between ranks while nothing is computed"
    )
    assert "no_sync" in finding.next


def test_a_trace_tells_where_the_host_cannot_see_it():
    trace = TraceSummary(steps=3, step_ms=10.0, exposed_communication_ms=4.0)
    ranks = (rank(0, exposed_ms=None), rank(1, exposed_ms=None))

    finding = check(profile(ranks=ranks, trace=trace), machine())

    assert finding.share == pytest.approx(0.4)


@pytest.mark.parametrize(
    "ranks",
    [(), (rank(0, exposed_ms=90.0), rank(1, exposed_ms=5.0)), (rank(0, exposed_ms=None),)],
    ids=["one process", "they wait for a straggler", "not seen"],
)
def test_it_is_silent_where_communication_is_not_the_cause(ranks):
    assert check(profile(ranks=ranks), machine()) is None


def test_a_trace_is_not_believed_where_a_straggler_is_waited_for():
    trace = TraceSummary(steps=3, step_ms=10.0, exposed_communication_ms=4.0)
    ranks = (rank(0, exposed_ms=None), rank(1, exposed_ms=None, is_straggler=True))

    assert check(profile(ranks=ranks, trace=trace), machine()) is None
