from dataclasses import replace

from flatout.records.profile import Ceilings
from flatout.rules.runtime.short_of_cores import check
from tests.rules.pipeline_facts import pipeline
from tests.techniques.facts import loader, machine, profile

TURNS = {
    "next_workers": {"workers": "more"},
    "next_techniques": {"workers": "not more"},
    "next_none": {"workers": "not more"},
}


def waiting(*, workers=2, **changes):
    return profile(
        phases_ms={"data_wait": 100.0},
        pipeline=pipeline(**changes),
        loaders=(loader(num_workers=workers),),
    )


def test_too_few_cores_are_reported_with_the_costliest_leg():
    finding = check(waiting(), machine(usable_cores=2))

    assert finding.share == 0.5
    assert finding.because == (
        "a sample takes 4.00 ms of one core, so 8.0 cores feed one device at the 2000 samples/s "
        "it takes when data is free, and 2.0 are there; 75 % of it is decode"
    )
    assert finding.next == (
        "more workers cannot help, cheaper samples do: "
        "flatout tune --only fast_decode,ram_cache train.py"
    )


def test_without_a_technique_it_says_what_is_left_to_do():
    assert (
        "store it in a cheaper form" in check(waiting(techniques=()), machine(usable_cores=2)).next
    )


def test_techniques_that_need_a_store_or_consent_are_in_no_command():
    found = check(waiting(techniques=("packed_data", "scaled_decode", "fast_decode")), machine())

    assert "fast_decode" in found.next
    assert "packed_data" not in found.next
    assert "scaled_decode" not in found.next


def test_it_is_silent_where_the_cores_do_or_nothing_waits():
    assert check(waiting(needed=1.5), machine()) is None
    assert check(profile(pipeline=pipeline()), machine()) is None
    assert check(profile(phases_ms={"data_wait": 100.0}), machine()) is None


def test_as_long_as_cores_are_free_workers_come_first():
    finding = check(waiting(workers=0, needed=20, usable=8), machine())

    assert finding.next == (
        "up to 8 workers help (they make 2000 samples/s at most), beyond them cheaper samples do: "
        "flatout tune --only loader_workers,fast_decode,ram_cache train.py"
    )


def test_a_worker_for_every_core_leaves_cheaper_samples_alone():
    assert "cannot help" in check(waiting(workers=8, needed=20, usable=8), machine()).next


def test_a_wait_that_free_data_does_not_shorten_is_no_loss():
    free = Ceilings(free_data=1.02, is_measured=True)

    assert check(replace(waiting(), ceilings=free), machine()) is None


def test_few_cores_are_not_none():
    text = check(waiting(needed=0.01, usable=0.001), machine()).because

    assert "<0.1 cores feed one device" in text
