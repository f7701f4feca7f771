from dataclasses import replace

import pytest

from flatout.core.profile import Ceilings
from flatout.rules.runtime.blocked_reads import check
from tests.rules.journey_facts import journey
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, profile


def waiting(wait_ms, **legs):
    return profile(
        phases_ms={"data_wait": wait_ms, "forward": 20.0, "backward": 30.0},
        loaders=(loader(num_workers=2),),
        journey=journey(**legs),
    )


def test_a_wait_for_blocked_reads_is_reported_with_its_numbers():
    finding = check(waiting(50.0), machine())

    assert finding.share == pytest.approx(0.5 * 60 / 90)
    assert finding.because == (
        "of the 90.0 ms that making a step's batch takes, 60.0 ms (67 %) are blocked in reading "
        "samples: storage, network or a lock, not computing; 0.0 MiB a step came from storage"
    )
    assert "more workers" in finding.next


def test_with_a_worker_for_every_core_it_says_that_more_may_still_help():
    finding = check(waiting(50.0), machine(usable_cores=2))

    assert "more of them than cores" in finding.next
    assert "local disk" in finding.next


def test_it_is_silent_where_computing_takes_longer_or_nothing_waits():
    assert check(waiting(50.0, decode_ms=80.0), machine()) is None
    assert check(waiting(5.0), machine()) is None
    assert check(profile(phases_ms={"data_wait": 50.0}), machine()) is None


def test_the_workers_of_a_rank_are_held_against_the_cores_of_a_rank():
    ranks = tuple(rank(number) for number in range(4))

    finding = check(replace(waiting(50.0), ranks=ranks), machine(usable_cores=8))

    assert "more of them than cores" in finding.next


def test_a_wait_that_free_data_does_not_shorten_is_no_loss():
    free = Ceilings(free_data=1.02, is_measured=True)

    assert check(replace(waiting(50.0), ceilings=free), machine()) is None
