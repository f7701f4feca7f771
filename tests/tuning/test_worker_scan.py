import math
from dataclasses import replace

import pytest

from flatout.records.journey import TRAINING, Journey, Leg
from flatout.records.profile import Spread
from flatout.records.readings import RankFacts
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.tuning.ranking import Search
from flatout.tuning.worker_scan import (
    WorkerScans,
    beside_fewer_threads,
    describe,
    scan,
    scan_of,
    visits,
)
from tests.support.answered import Answered
from tests.techniques.facts import GIB, loader, machine, profile

WORKERS = Choice(technique="loader_workers", settings={"num_workers": 4})
BF16 = Choice(technique="bf16_autocast")
SEEN = {
    "visits": [
        {"num_workers": n, "prefetch_factor": 2, "threads": 0, "batch_ms": ms, "start_ms": 10.0}
        for n, ms in ((0, 100.0), (2, 52.0), (4, 40.0), (4, 40.0), (0, 100.0))
    ],
    "epoch_batches": None,
    "stopped": "",
    "unvisited": [],
}


def waiting(**changes):
    known = {"phases_ms": {"data_wait": 100.0}, "loaders": (loader(),)} | changes
    return profile(**known)


def rank(number):
    return RankFacts(rank=number, step_ms=100.0, phases_ms={}, samples_per_s=1.0)


class LabThatSees:
    """Answers every look with the same visits."""

    def __init__(self, *seen, wall_s=1.0):
        self.machine = machine(usable_cores=2)
        self.seen = seen or (SEEN,)
        self.wall_s = wall_s
        self.looks = []

    def __call__(self, experiment):
        recipe, probes = experiment.recipe, experiment.options["probes"]
        seen = self.seen[min(len(self.looks), len(self.seen) - 1)]
        self.looks.append((recipe.names, probes["worker_scan"]))
        found = {"probes": {"worker_scan": seen} if seen else {}}
        return Trial(recipe=recipe, outcome=Outcome.OK, wall_s=self.wall_s, details=found)


def visited(unvisited, **batch_ms):
    """Return what one process saw: `w0=100.0` for the pace without workers."""
    visits = [
        {"num_workers": int(n[1:]), "prefetch_factor": 2, "threads": 0, "batch_ms": ms}
        | {"start_ms": 10.0}
        for n, ms in batch_ms.items()
    ]
    return SEEN | {"visits": visits, "unvisited": unvisited}


class Scans:
    """The scans of a tuning whose looks a lab answers."""

    def __init__(self, lab, search):
        self.runner = Answered(lab, lab.machine)
        self.scans = WorkerScans(history=self.runner.history, search=search)
        self.notes = self.scans.notes

    def of(self, *facts):
        return self.runner.drive(self.scans.of(*facts))


def scans(lab=None, **search):
    known = {"machine": machine(), "ceiling": Numerics.PRECISION} | search
    return Scans(lab or LabThatSees(), Search(**known))


def scanned(lab):
    runner = Answered(lab, lab.machine)
    return runner.drive(scan(runner.history, Recipe(), waiting(), 20.0))


def test_the_present_number_is_visited_first_and_then_doublings():
    assert visits(waiting(), machine(usable_cores=2)) == [(0, 0), (1, 2), (2, 2), (4, 2), (8, 2)]
    # Four workers of 16 are busy with what 100 ms of step take: one would be a fourth of them.
    at_work = waiting(phases_ms={"data_wait": 700.0}, loaders=(loader(),))
    assert [n for n, _ in visits(at_work, machine(usable_cores=16))] == [0, 2, 4, 8, 16, 32, 64]


def test_a_small_shared_memory_lowers_the_prefetch_and_then_the_workers():
    big = waiting(loaders=(loader(batch_bytes=10_000_000),))

    found = visits(big, machine(usable_cores=2, shm_free_bytes=80_000_000))

    assert found == [(0, 0), (1, 2), (2, 2), (4, 1)]


def test_both_visits_of_a_number_count():
    found = scan_of(SEEN, 0)

    assert [pace.num_workers for pace in found.paces] == [0, 2, 4]
    assert found.paces[2].batch_ms == (40.0, 40.0)
    assert found.best.num_workers == 4


@pytest.mark.parametrize("visits", [SEEN["visits"][1:3], SEEN["visits"][:1], []])
def test_a_scan_that_ended_early_says_nothing(visits):
    assert scan_of(SEEN | {"visits": visits}, 0) is None


def test_the_reader_is_told_what_was_seen():
    assert describe(scan_of(SEEN, 0)) == (
        "workers changed under the running training, against 0 of them: 2: 1.92x, 4: 2.50x; "
        "4 are proposed"
    )
    stuck = scan_of(SEEN | {"stopped": "more workers were no faster"}, 4)
    assert describe(stuck) == (
        "workers changed under the running training: 0: 0.40x, 2: 0.77x; none beats 4; more "
        "workers were no faster"
    )


def with_threads(*visits):
    more = [
        {"num_workers": n, "prefetch_factor": 2, "threads": 1, "batch_ms": ms, "start_ms": 10.0}
        for n, ms in visits
    ]
    return SEEN | {"visits": [*SEEN["visits"], *more]}


def test_workers_and_training_share_the_cores_by_what_each_has_to_do():
    here = machine(usable_cores=8)
    even = waiting(phases_ms={"data_wait": 800.0}, cpu_threads=8)

    # 800 ms on a core to make a batch, and 100 ms on each of eight to train with it.
    assert beside_fewer_threads(even, here) == [(4, 2, 4), (8, 2, 4)]
    assert beside_fewer_threads(waiting(cpu_threads=2), machine(usable_cores=2)) == [
        (1, 2, 1),
        (2, 2, 1),
    ]


@pytest.mark.parametrize(
    ("facts", "cores"),
    [
        (waiting(kind="cuda", cpu_threads=8), 8),
        (waiting(cpu_threads=1), 8),
        (waiting(cpu_threads=8), 1),
    ],
)
def test_where_nothing_can_be_shared_no_threads_are_taken_away(facts, cores):
    assert beside_fewer_threads(facts, machine(usable_cores=cores)) == []


def test_threads_stay_as_they_are_where_that_may_not_be_changed():
    seen = []
    for search in ({}, {"skip": ("cpu_threads",)}, {"ceiling": Numerics.EXACT}):
        lab = LabThatSees()
        scans(lab, **search).of(Recipe(), waiting(cpu_threads=2), 200.0)
        seen.append([threads for _, _, threads in lab.looks[0][1]["visits"]])

    # Numbers up to the cores, then those with fewer threads, then more workers than cores.
    assert seen == [[0, 0, 0, 1, 1, 0, 0], [0] * 5, [0] * 5]


def test_a_pair_is_best_only_where_the_threads_add_something():
    slight = scan_of(with_threads((2, 39.0)), 0)
    # Of as good ones the most: what comes next will leave more cores to them.
    clear = scan_of(with_threads((1, 29.5), (2, 30.0)), 0)

    assert slight.best_pair is None
    assert (clear.best_pair.num_workers, clear.best_pair.threads) == (2, 1)
    assert clear.best.num_workers == 4
    assert clear.gain(clear.best_pair) == pytest.approx(100 / 30)
    assert describe(clear) == (
        "workers changed under the running training, against 0 of them: with threads=1 it was "
        "1: 3.39x, 2: 3.33x, without it 2: 1.92x, 4: 2.50x; 2 are proposed with threads=1"
    )


def test_one_scan_serves_all_recipes_that_differ_in_their_workers_only():
    lab = LabThatSees()
    known = scans(lab)

    first = known.of(Recipe(), waiting(), 100.0)
    again = known.of(Recipe(choices=(WORKERS,)), waiting(), 100.0)
    other = known.of(Recipe(choices=(BF16,)), waiting(), 100.0)

    assert first is again
    # With the most workers that there may be, another step needs no other number.
    assert other is first
    assert len(lab.looks) == len(known.notes()) == 1


def test_a_step_that_still_waits_is_scanned_again_where_there_may_be_more_workers():
    more = SEEN["visits"][0] | {"num_workers": 8, "batch_ms": 60.0}
    lab = LabThatSees(SEEN | {"visits": [*SEEN["visits"], more]})
    known = scans(lab)
    starved = waiting(kind="cuda")
    known.of(Recipe(), starved, 400.0)

    calm = waiting(phases_ms={"data_wait": 6.0}, loaders=(loader(),), kind="cuda")
    assert known.of(Recipe(choices=(BF16,)), calm, 400.0) is not None
    assert len(lab.looks) == 1

    known.of(Recipe(choices=(BF16,)), starved, 400.0)
    assert [names for names, _ in lab.looks] == [(), ("bf16_autocast",)]
    assert lab.looks[1][1]["max_s"] == pytest.approx(20.0)

    for name in ("channels_last", "fused_optimizer", "torch_compile"):
        known.of(Recipe(choices=(Choice(technique=name),)), starved, 400.0)
    assert len(lab.looks) == 3


def test_a_scan_that_failed_is_not_repeated():
    lab = LabThatSees(None)
    known = scans(lab)

    assert [known.of(Recipe(), waiting(), 100.0) for _ in range(2)] == [None, None]
    assert len(lab.looks) == 1
    assert known.notes() == []


def test_the_scan_takes_a_part_of_the_time_that_is_left():
    lab = LabThatSees()

    scans(lab).of(Recipe(), waiting(), 200.0)
    assert scans(lab).of(Recipe(), waiting(), 90.0) is None

    ((_, options),) = lab.looks
    assert options["max_s"] == pytest.approx(20.0)
    assert options["room_bytes"] < math.inf


@pytest.mark.parametrize(
    ("facts", "search"),
    [
        (waiting(phases_ms={"data_wait": 0.1}), {}),
        (waiting(loaders=(loader(is_iterable=True),)), {}),
        (waiting(loaders=(loader(), loader(address="main:2"))), {}),
        (waiting(ranks=tuple(rank(n) for n in (0, 1))), {}),
        (waiting(), {"skip": ("loader_workers",)}),
        (waiting(), {"only": ("bf16_autocast",)}),
    ],
)
def test_nothing_is_scanned_where_it_could_not_be_used(facts, search):
    lab = LabThatSees()

    assert scans(lab, **search).of(Recipe(), facts, 1000.0) is None
    assert lab.looks == []


def test_only_the_memory_that_there_is_may_be_filled():
    lab = LabThatSees()
    lab.machine = replace(lab.machine, memory_bytes=16 * GIB)

    scans(lab).of(Recipe(), waiting(), 100.0)

    assert lab.looks[0][1]["room_bytes"] == 8 * GIB


@pytest.mark.parametrize(("epoch_steps", "is_short"), [(None, False), (20, True), (200, False)])
def test_short_epochs_are_visited_whole(epoch_steps, is_short):
    lab = LabThatSees()

    scans(lab).of(Recipe(), waiting(epoch_steps=epoch_steps), 100.0)

    assert lab.looks[0][1]["whole_epochs"] is is_short


def blocked(**changes):
    """Return a step without workers that waits for storage for nearly all of its time."""
    seen = Journey(legs=(leg("read", 190.0), leg("decode", 9.0), leg("collate", 1.0)))
    known = {"step_ms": Spread(median=210.0, p10=210.0, p90=210.0, n=20)}
    return waiting(phases_ms={"data_wait": 200.0}, journey=seen, **known, **changes)


def leg(name, ms):
    return Leg(name=name, where=TRAINING, ms=ms, share=0.1)


def test_loading_that_waits_is_visited_with_more_workers_than_the_cores_keep_busy():
    assert [n for n, _ in visits(blocked(), machine(usable_cores=2))] == [0, 1, 2, 4, 8, 16, 32]
    assert [n for n, _ in visits(waiting(), machine(usable_cores=2))] == [0, 1, 2, 4, 8]


def test_a_script_that_ends_early_is_started_again_for_the_numbers_it_was_not_seen_with():
    lab = LabThatSees(
        visited([[2, 2, 0], [4, 2, 0], [8, 2, 0]], w0=100.0, w1=60.0),
        # Another process, in which everything takes twice as long.
        visited([[4, 2, 0], [2, 2, 0]], w0=200.0, w8=40.0),
        visited([[2, 2, 0]], w0=100.0, w4=24.0),
        visited([], w0=100.0, w2=50.0),
    )

    found = scanned(lab)

    assert [options["visits"][1:] for _, options in lab.looks[1:]] == [
        [(8, 2, 0), (4, 2, 0), (2, 2, 0)],
        [(2, 2, 0), (4, 2, 0)],
        [(2, 2, 0)],
    ]
    assert {pace.num_workers: pace.mean_ms for pace in found.paces} == pytest.approx(
        {0: 100.0, 1: 60.0, 2: 50.0, 4: 24.0, 8: 20.0}
    )
    assert found.best.num_workers == 8
    assert not found.stopped


def test_it_is_started_again_only_while_the_scan_has_time_and_that_is_said():
    lab = LabThatSees(visited([[4, 2, 0]], w0=100.0, w1=60.0), wall_s=25.0)

    found = scanned(lab)

    assert len(lab.looks) == 1
    assert "the script ended before it was seen with 4" in describe(found)


def test_a_script_that_shows_no_other_number_is_not_started_again():
    lab = LabThatSees(visited([[1, 2, 0], [2, 2, 0]], w0=100.0))

    assert scanned(lab) is None
    assert len(lab.looks) == 1


def test_a_training_on_the_cpu_is_scanned_again_where_its_loading_waits():
    few = visited([], w0=200.0, w1=150.0, w2=100.0, w4=190.0)
    lab = LabThatSees(few)
    known = scans(lab)
    known.of(Recipe(), blocked(), 400.0)
    known.of(Recipe(choices=(BF16,)), blocked(), 400.0)
    assert len(lab.looks) == 2

    lab = LabThatSees(few)
    known = scans(lab)
    known.of(Recipe(), waiting(), 400.0)
    known.of(Recipe(choices=(BF16,)), waiting(), 400.0)
    assert len(lab.looks) == 1
