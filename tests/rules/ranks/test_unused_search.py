import pytest

from flatout.rules.ranks.unused_search import check
from tests.techniques.facts import machine, model, profile


def test_a_search_that_finds_nothing_costs_a_part_of_the_forward():
    finding = check(profile(models=(model(finds_unused=True, unused_bytes=0),)), machine())

    assert finding.share == pytest.approx(0.4)
    assert finding.is_bound


@pytest.mark.parametrize(
    "facts",
    [{}, {"finds_unused": True}, {"finds_unused": True, "unused_bytes": 48}],
    ids=["off", "not known", "needed"],
)
def test_it_is_silent_where_it_is_off_needed_or_not_known(facts):
    assert check(profile(models=(model(**facts),)), machine()) is None
