import json
from dataclasses import replace

import pytest

from flatout.analysis.disturbance import notes_on, of_device, of_load
from flatout.records.profile import profile_from_json
from flatout.records.readings import GpuReadings, RankFacts
from tests.paths import ROOT
from tests.support.trial_runs import machine
from tests.techniques.facts import loader
from tests.techniques.facts import machine as any_machine

DATA = ROOT / "tests/reporting/data"
QUIET = {"foreign_share": 0.01, "steal_share": 0.0, "delay_share": 0.01, "wall_s": 10.0}


def cores(count):
    return any_machine(usable_cores=count)


@pytest.fixture
def profile():
    stored = profile_from_json(json.loads((DATA / "profile_starved.json").read_text()))
    return replace(stored, loaders=(), cpu_threads=1)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({}, ()),
        ({"foreign_share": 0.4}, ("other processes took 40 % of the cores",)),
        ({"steal_share": 0.1}, ("other virtual machines took 10 % of the cores (steal)",)),
        ({"delay_share": 0.5}, ()),
        (
            {"delay_share": 0.5, "foreign_share": 0.04},
            (
                "the training waited for a core 50 % of the time while other processes took 4 % "
                "of the cores",
            ),
        ),
    ],
)
def test_other_work_on_the_cores_is_named(profile, load, said):
    assert of_load(QUIET | load, profile, machine()) == said


def test_a_delay_of_the_jobs_own_making_disturbs_nothing(profile):
    crowded = replace(profile, cpu_threads=64)

    assert of_load(QUIET | {"delay_share": 0.5, "foreign_share": 0.04}, crowded, machine()) == ()


@pytest.mark.parametrize(
    ("workers", "ranks", "is_disturbed"), [(0, 1, True), (2, 1, False), (0, 4, False)]
)
def test_the_workers_of_the_recipe_count_on_every_rank(profile, workers, ranks, is_disturbed):
    rank = RankFacts(rank=0, step_ms=100.0, phases_ms={}, samples_per_s=1.0)
    own = loader(num_workers=8, effective_workers=workers)
    seen = replace(profile, loaders=(own,), ranks=(rank,) * ranks)

    found = of_load(QUIET | {"delay_share": 0.5, "foreign_share": 0.04}, seen, cores(2))

    assert bool(found) is is_disturbed


def test_a_few_ticks_in_a_short_window_are_no_evidence(profile):
    assert of_load({"foreign_share": 0.06, "wall_s": 0.2}, profile, machine()) == ()


@pytest.mark.parametrize("name", ["hardware slowdown", "software thermal slowdown", "power brake"])
def test_a_gpu_that_had_to_slow_down_is_named(name):
    (said,) = of_device(GpuReadings(throttle=(name,), throttle_shares={name: 0.5}))

    assert said == f"the GPU lowered its clocks in 50 % of the samples: {name}"


def test_a_power_cap_is_a_note_and_no_disturbance():
    capped = GpuReadings(throttle=("power cap",), throttle_shares={"power cap": 0.9})

    assert of_device(capped) == ()
    assert "power limit in 90 % of the samples" in notes_on(capped)[0]


def test_a_slowdown_in_one_of_many_samples_is_no_evidence():
    assert of_device(GpuReadings(throttle_shares={"hardware slowdown": 0.05})) == ()


def test_somebody_else_who_computes_on_the_gpu_is_named_and_one_who_idles_is_noted():
    shared = GpuReadings(other_processes=1)
    parked = GpuReadings(other_processes=2, other_idle_processes=2)

    assert of_device(shared) == ("another process computes on the same GPU",)
    assert of_device(parked) == ()
    assert "2 other process(es) hold memory" in notes_on(parked)[0]


def test_a_run_without_a_gpu_has_nothing_to_say_about_it():
    assert (of_device(None), notes_on(None)) == ((), ())
