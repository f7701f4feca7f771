from dataclasses import replace

import pytest

from flatout.records.profile import Ceilings
from flatout.rules.runtime.data_wait import check
from tests.rules.journey_facts import journey
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, profile

TURNS = {
    "next_workers": {"workers": "more"},
    "next_other": {"workers": "more"},
    "next_foreign": {"workers": "more"},
    "next_fewer": {"workers": "fewer"},
    "next_none": {"workers": "fewer"},
    "next_cheaper": {"workers": "not more"},
}


def waiting(wait_ms, *, workers=0):
    return profile(
        phases_ms={"data_wait": wait_ms, "forward": 40.0, "backward": 20.0},
        loaders=(loader(num_workers=workers),),
        ceilings=Ceilings(free_data=1 + wait_ms / 60),
    )


def test_a_long_wait_is_reported_with_its_numbers():
    finding = check(waiting(40.0), machine())

    assert finding.share == 0.4
    assert finding.because == (
        "the step waits 40.0 ms of 100 ms for its batch (40 %, n=20) with 0 loader workers; "
        "with data for free it would be 1.67x as fast"
    )
    assert "--only loader_workers,persistent_workers" in finding.next


def test_it_is_silent_below_a_tenth():
    assert check(waiting(6.0), machine()) is None


def test_what_to_do_depends_on_the_workers_there_are():
    few = check(waiting(40.0, workers=2), machine(usable_cores=4))
    many = check(waiting(40.0, workers=8), machine(usable_cores=4))

    assert few.next.startswith("try up to 4 workers: ")
    assert "8 workers share 4 cores" in many.next


def measured(wait_ms, free_data):
    return profile(
        phases_ms={"data_wait": wait_ms, "forward": 40.0, "backward": 20.0},
        ceilings=Ceilings(free_data=free_data, is_measured=True),
    )


def test_a_wait_that_free_data_does_not_shorten_is_no_loss():
    assert check(measured(40.0, 1.02), machine()) is None
    assert check(measured(40.0, 1.13), machine()) is None


def test_the_share_is_at_most_what_free_data_won():
    finding = check(measured(40.0, 1.25), machine())

    assert finding.share == pytest.approx(0.2)
    assert "waits 40.0 ms of 100 ms for its batch (40 %" in finding.because
    assert finding.because.endswith("1.25x as fast, so 20 % of the step is lost to the wait")
    assert check(measured(40.0, 3.0), machine()).share == pytest.approx(0.4)


def test_the_workers_of_a_rank_are_held_against_the_cores_of_a_rank():
    facts = profile(
        phases_ms={"data_wait": 100.0},
        loaders=(loader(num_workers=8),),
        ranks=tuple(rank(number) for number in range(8)),
    )

    finding = check(facts, machine(usable_cores=16))

    assert "8 workers share 2 cores" in finding.next


def test_a_loader_that_no_technique_reaches_is_not_given_to_one():
    foreign = replace(waiting(40.0), loaders=())

    finding = check(foreign, machine())

    assert "loader workers" not in finding.because
    assert "another kind than torch's DataLoader" in finding.next


def sent(wait_ms, *, decode_ms, read_ms=0.0):
    """Return a step that waits for two workers, whose batches take so long to make."""
    legs = journey(read_ms=read_ms, decode_ms=decode_ms, collate_ms=0.0)
    return profile(
        phases_ms={"data_wait": wait_ms, "forward": 40.0, "backward": 20.0},
        loaders=(loader(num_workers=2),),
        journey=legs,
    )


def test_workers_that_cost_more_than_they_make_are_advised_against():
    slower = check(sent(40.0, decode_ms=10.0), machine())

    assert slower.next.startswith("making a step's batch takes 10.0 ms in all, less than the wait")
    assert "num_workers=0" in slower.next


def test_workers_that_make_or_read_for_longer_than_the_wait_are_not():
    assert "num_workers=0" not in check(sent(40.0, decode_ms=30.0), machine()).next
    assert "num_workers=0" not in check(sent(40.0, decode_ms=4.0, read_ms=8.0), machine()).next
