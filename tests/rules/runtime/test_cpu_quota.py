from dataclasses import replace

import pytest

from flatout.records.readings import RankFacts
from flatout.rules.runtime.cpu_quota import check
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import machine
from tests.techniques.facts import starved as waiting


def starved(wait_ms=100.0, needed=8.0):
    return replace(waiting(wait_ms), pipeline=pipeline(needed=needed, usable=2.0))


def on(**facts):
    return machine(usable_cores=2, logical_cores=64, facts={"affinity_cores": 64} | facts)


def test_a_quota_below_the_cores_of_the_host_is_named_with_what_is_needed():
    finding = check(starved(), on(quota_cores=2.0))

    assert finding.because == (
        "a quota leaves 2.0 of 64 cores to this container, and 8.0 would make the samples that "
        "the step takes"
    )
    assert "docker run --cpus 8" in finding.next
    assert finding.share == 0.5


def test_the_quota_of_a_container_is_held_against_all_its_ranks():
    rank = RankFacts(rank=0, step_ms=100.0, phases_ms={}, samples_per_s=1.0)

    finding = check(replace(starved(), ranks=(rank,) * 4), on(quota_cores=8.0))

    assert "and 32.0 would make the samples" in finding.because
    assert "docker run --cpus 32" in finding.next


@pytest.mark.parametrize(
    ("facts", "host"),
    [
        (starved(), on(quota_cores=None)),
        (starved(), on(quota_cores=64.0)),
        (starved(needed=1.5), on(quota_cores=2.0)),
        (starved(5.0), on(quota_cores=2.0)),
        (waiting(), on(quota_cores=2.0)),
    ],
    ids=["no quota", "as many as there are", "enough cores", "no wait", "no look at samples"],
)
def test_it_is_silent_where_the_quota_is_not_the_cause(facts, host):
    assert check(facts, host) is None
