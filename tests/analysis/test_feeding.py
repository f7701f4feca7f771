import pytest

from flatout.analysis.feeding import (
    fed_change_ms,
    loading,
    share_of,
    useful_workers,
)
from flatout.records.journey import Journey, Leg
from tests.rules.journey_facts import journey
from tests.techniques.facts import loader, machine, pipeline, profile


def starved(workers=0, *, wait_ms=300.0, **changes):
    loaders = (loader(num_workers=workers),)
    return profile(phases_ms={"data_wait": wait_ms}, loaders=loaders, **changes)


def test_without_workers_what_is_saved_goes_from_the_wait():
    assert fed_change_ms(starved(), machine(), saved_share=0.25) == pytest.approx(-75)


def test_a_look_that_took_longer_than_the_loop_waits_foretells_no_loss():
    legs = (Leg(name="decode", where="training", ms=150.0, share=0.7),)
    slow = starved(wait_ms=100.0, journey=Journey(legs=legs))

    assert loading(slow, cores=4).cpu_ms == 150
    assert fed_change_ms(slow, machine(), saved_share=0.25) == pytest.approx(-25)


def test_a_worker_that_is_the_longest_way_shortens_the_step_as_far_as_the_training_goes():
    changes = [fed_change_ms(starved(1), machine(), saved_share=part) for part in (0.2, 0.5, 0.9)]

    assert changes == pytest.approx([-80, -200, -300])  # the training itself takes 100


def test_where_training_takes_the_same_cores_less_loading_brings_less():
    """Two workers on two cores, which the training's two threads use for a quarter of the time."""
    alone = fed_change_ms(starved(2, kind="cuda"), machine(usable_cores=2), saved_share=0.4)
    shared = fed_change_ms(starved(2, cpu_threads=2), machine(usable_cores=2), saved_share=0.4)

    assert shared > alone > -300
    assert shared == pytest.approx(400 * (480 + 200) / (800 + 200) - 400)


def test_a_loop_that_does_not_wait_gains_nothing():
    assert fed_change_ms(starved(2, wait_ms=0.0), machine(), saved_share=0.9) == 0


def test_a_stage_is_told_by_its_part_of_making_a_sample_and_not_of_sending_it():
    looked = profile(pipeline=pipeline(decode=1.0, resize=0.5, python=0.5, transport=2.0))

    assert share_of(looked, "resize", "decode", otherwise=0.9) == pytest.approx(0.75)
    assert share_of(profile(), "resize", otherwise=0.9) == 0.9


def test_workers_that_wait_for_storage_leave_their_cores_to_others():
    # Of 90 ms a step 30 need a core; two workers take 100 ms for it, and 50 are left to hide it.
    facts = profile(
        phases_ms={"data_wait": 50.0, "forward": 20.0, "backward": 30.0},
        loaders=(loader(num_workers=2),),
        journey=journey(),
    )

    assert useful_workers(facts, machine(usable_cores=8)) == 4
    assert useful_workers(facts, machine(usable_cores=1)) == 3


def test_without_a_wait_for_storage_more_workers_than_cores_are_of_no_use():
    facts = profile(phases_ms={"data_wait": 300.0}, loaders=(loader(num_workers=2),))

    assert useful_workers(facts, machine(usable_cores=2)) == 2
