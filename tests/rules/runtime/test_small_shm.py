import pytest

from flatout.rules.runtime.small_shm import check
from tests.techniques.facts import loader, machine, profile

MIB = 1024**2


def starved(wait_ms=300.0, **changes):
    """Return a profile that four workers would feed, with batches of 16 MiB."""
    known = {"batch_bytes": 16 * MIB} | changes
    return profile(phases_ms={"data_wait": wait_ms}, loaders=(loader(**known),))


def test_workers_that_would_help_and_do_not_fit_are_counted():
    finding = check(starved(), machine(shm_free_bytes=64 * MIB))

    assert finding.because == (
        "3 loader workers would feed the step; their batches of 16.0 MiB, two each and half as "
        "much again, take 144.0 MiB of /dev/shm, and 64.0 MiB are free: at the first that does "
        "not fit a worker ends with a bus error"
    )
    assert "--shm-size 1g" in finding.next


@pytest.mark.parametrize(
    ("facts", "free"),
    [(starved(), 256 * MIB), (starved(5.0), 64 * MIB), (starved(batch_bytes=0), 64 * MIB)],
    ids=["room", "no wait", "unknown size"],
)
def test_it_is_silent_where_they_fit_or_nothing_waits(facts, free):
    assert check(facts, machine(shm_free_bytes=free)) is None


def test_workers_that_are_there_and_run_are_left_alone():
    facts = starved(100.0, num_workers=8)

    assert check(facts, machine(shm_free_bytes=64 * MIB, usable_cores=2)) is None
