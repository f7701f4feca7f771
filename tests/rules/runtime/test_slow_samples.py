from dataclasses import replace

import pytest

from flatout.rules.runtime.slow_samples import check
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import loader, machine, profile


def known(wait_ms=100.0, **changes):
    few = {"slow_samples": 2, "slow_share": 0.5, "slowest_sample": 17, "slowest_ms": 900.0}
    looked = replace(pipeline(), median_ms=2.0, **few | changes)
    return profile(phases_ms={"data_wait": wait_ms}, loaders=(loader(),), pipeline=looked)


def test_a_few_samples_that_take_half_of_the_time_are_named():
    finding = check(known(), machine())

    assert finding.because == (
        "2 of 64 samples take 50 % of the time of all: up to 900 ms, 2.00 ms in the middle"
    )
    assert "sample 17 of the data set" in finding.next
    assert finding.share == pytest.approx(0.25)


def test_samples_without_numbers_are_only_counted():
    assert "look for samples" in check(known(slowest_sample=None), machine()).next


@pytest.mark.parametrize(
    "silent",
    [known(wait_ms=5.0), known(slow_share=0.1), known(slow_samples=20)],
    ids=["no wait", "little", "many"],
)
def test_it_is_silent_where_they_cost_little_or_are_many(silent):
    assert check(silent, machine()) is None
