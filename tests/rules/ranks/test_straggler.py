import pytest

from flatout.rules.ranks.straggler import check
from tests.rules.rank_facts import rank
from tests.techniques.facts import machine, profile

TURNS = {"next": {}}
BEHIND = {"is_straggler": True, "because": "forward takes it 60.0 ms a step against 30.0 ms"}


def test_the_rank_that_is_behind_is_named_with_its_cause_and_its_share():
    ranks = (rank(0, exposed_ms=40.0), rank(1, exposed_ms=10.0, **BEHIND))

    finding = check(profile(ranks=ranks), machine())

    assert finding.because == (
        "rank 1 holds up the other rank: forward takes it 60.0 ms a step against 30.0 ms"
    )
    assert finding.share == pytest.approx(0.3)


def test_where_communication_is_not_seen_the_backward_stays_out():
    ranks = (
        rank(0, exposed_ms=None, backward=60.0),
        rank(1, exposed_ms=None, backward=20.0, **BEHIND),
        rank(2, exposed_ms=None, backward=60.0),
    )

    finding = check(profile(ranks=ranks), machine())

    assert finding.share == pytest.approx(0.4)
    assert "holds up 2 others" in finding.because


@pytest.mark.parametrize("ranks", [(), (rank(0), rank(1))], ids=["one process", "nobody behind"])
def test_it_is_silent_without_a_straggler(ranks):
    assert check(profile(ranks=ranks), machine()) is None
