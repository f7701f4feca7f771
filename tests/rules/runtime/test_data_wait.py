from flatout.core.profile import Ceilings
from flatout.rules.runtime.data_wait import check
from tests.techniques.facts import loader, machine, profile


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

    assert "other numbers of workers" in few.next
    assert "8 workers share 4 cores" in many.next
