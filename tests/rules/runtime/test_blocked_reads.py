from dataclasses import replace

import pytest

from flatout.records.journey import TRAINING, Journey
from flatout.records.profile import Ceilings
from flatout.rules.runtime.blocked_reads import check
from tests.rules.journey_facts import journey, leg, worker
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, profile

TURNS = {
    "next_more": {"workers": "more"},
    "next_pack": {"workers": "more"},
    "next_foreign": {"workers": "more"},
    "next_local": {"workers": "not more"},
}


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
        "samples: storage, network or a lock, not computing; none from storage"
    )
    assert finding.next.startswith("let up to 4 workers read at the same time: ")


def test_with_a_worker_for_every_core_it_says_that_more_may_still_help():
    finding = check(waiting(50.0), machine(usable_cores=2))

    assert finding.next.startswith("blocked workers need no core, so up to 4 of them help: ")
    assert "local disk" in finding.next


def test_where_no_more_workers_can_help_none_are_asked_for():
    facts = replace(waiting(20.0), loaders=(loader(num_workers=12),))

    finding = check(facts, machine(usable_cores=2))

    assert finding.next.startswith("more workers do not help: ")


def test_bytes_that_came_from_storage_are_never_shown_as_none():
    workers = tuple(worker(number, storage_bytes_per_step=11.0) for number in (0, 1))
    facts = waiting(50.0)

    few = check(replace(facts, journey=replace(facts.journey, workers=workers)), machine())

    assert few.because.endswith("; 22 bytes a step came from storage")


def test_it_is_silent_where_computing_takes_longer_or_nothing_waits():
    assert check(waiting(50.0, decode_ms=80.0), machine()) is None
    assert check(waiting(5.0), machine()) is None
    assert check(profile(phases_ms={"data_wait": 50.0}), machine()) is None


def test_the_workers_of_a_rank_are_held_against_the_cores_of_a_rank():
    ranks = tuple(rank(number) for number in range(4))

    finding = check(replace(waiting(50.0), ranks=ranks), machine(usable_cores=8))

    assert "up to 4 of them help" in finding.next


def test_a_wait_that_free_data_does_not_shorten_is_no_loss():
    free = Ceilings(free_data=1.02, is_measured=True)

    assert check(replace(waiting(50.0), ceilings=free), machine()) is None


def test_a_loader_that_no_technique_reaches_is_not_given_to_one():
    assert (
        "another kind than torch's DataLoader"
        in check(replace(waiting(50.0), loaders=(), journey=journey_in_the_loop()), machine()).next
    )


def journey_in_the_loop():
    legs = (leg("read", 60.0, where=TRAINING), leg("decode", 20.0, where=TRAINING))
    return Journey(legs=legs, workers=(worker(-1),))
