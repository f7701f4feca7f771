from dataclasses import dataclass, field, replace

import pytest

from flatout.core.ablation import Ablation, ablation_from_json
from flatout.core.feeding import Feeding
from flatout.core.recipe import Recipe
from flatout.core.trial import Outcome, Trial
from flatout.core.workload import Workload
from flatout.reporting.verdict import feeding_words
from flatout.workflow.feeding import feeding_of, find_trained_ms
from flatout.workflow.lab import Lab
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, pipeline, profile


def final(**changes):
    """Return a step of 100 ms for 10 samples."""
    return profile(loaders=(loader(),), samples_per_step=10.0, **changes)


def looked(**stages):
    return replace(pipeline(**stages), usable_cores=2)


def test_on_a_gpu_the_cores_make_samples_and_nothing_else():
    found = feeding_of(final(kind="cuda"), 50.0, looked(decode=5.0, transform=15.0), 0.0)

    assert (found.samples_per_s, found.free_data_per_s) == (100, 200)
    assert (found.cores_per_s, found.decode_per_s) == (100, 400)
    assert (found.binds, found.share) == ("cores", 1.0)


def test_a_training_on_the_cpu_takes_its_part_of_the_cores():
    found = feeding_of(final(), 50.0, looked(decode=5.0, transform=10.0), 50.0)

    assert found.trained_ms == 5.0
    assert (found.cores_per_s, found.decode_per_s) == (100, 200)


def test_where_the_cores_have_time_left_free_data_is_the_limit():
    found = feeding_of(final(kind="cuda"), 80.0, looked(python=1.0), 0.0)

    assert (found.binds, found.share, found.decode_per_s) == ("free_data", 0.8, None)


def test_the_rates_are_those_of_all_ranks_together():
    ranks = (rank(0), rank(1))
    whole = replace(final(kind="cuda", ranks=ranks), samples_per_step=20.0)

    found = feeding_of(whole, 50.0, looked(decode=5.0, transform=15.0), 0.0)

    # Each rank has two cores and trains on ten samples a step.
    assert (found.samples_per_s, found.free_data_per_s) == (200, 400)
    assert (found.cores_per_s, found.share) == (200, 1.0)


def test_a_rank_s_training_takes_from_a_rank_s_cores():
    whole = replace(final(ranks=(rank(0), rank(1))), samples_per_step=20.0)

    found = feeding_of(whole, 50.0, looked(decode=5.0, transform=10.0), 50.0)

    assert found.trained_ms == 5.0
    assert found.cores_per_s == 200


@dataclass
class Threaded:
    """Trains on free data: two threads take 60 ms, of which they spin much; one takes 80 ms."""

    obeys: bool = True
    threads: int = 2
    asked: list[str] = field(default_factory=list)

    def __call__(self, workload, recipe, machine, options):
        assert options.probes
        self.asked.append(recipe.label)
        is_one = self.obeys and {"threads": 1} in [dict(x.settings) for x in recipe.choices]
        threads = 1 if is_one else self.threads
        phases = {"forward": 40.0, "backward": 40.0 if is_one else 20.0, "data_wait": 3.0}
        trial = profile(phases_ms=phases, cpu_threads=threads)
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=trial)


def trained_ms(runner, folder, **free):
    lab = Lab(
        workload=Workload(target="train.py", folder=folder),
        machine=machine(usable_cores=2),
        out=folder,
        limit_s=60.0,
        runner=runner,
    )
    phases = {"forward": 40.0, "backward": 20.0, "data_wait": 3.0}
    return find_trained_ms(lab, Recipe(), profile(phases_ms=phases, **free))


def test_training_takes_from_the_cores_what_it_takes_on_one_thread(tmp_path):
    runner = Threaded()

    assert trained_ms(runner, tmp_path, cpu_threads=2) == 80.0
    assert runner.asked == ["cpu_threads threads=1"]


def test_a_script_that_sets_its_threads_itself_takes_all_of_them(tmp_path):
    assert trained_ms(Threaded(obeys=False), tmp_path, cpu_threads=2) == 120.0


def test_more_threads_than_cores_take_the_cores(tmp_path):
    assert trained_ms(Threaded(obeys=False, threads=8), tmp_path, cpu_threads=8) == 120.0


def test_on_one_thread_already_it_is_looked_at_as_it_is(tmp_path):
    runner = Threaded(threads=1)

    assert trained_ms(runner, tmp_path, cpu_threads=1) == 60.0
    assert runner.asked == ["baseline"]


def test_another_device_takes_nothing_from_the_cores(tmp_path):
    runner = Threaded()

    assert trained_ms(runner, tmp_path, kind="cuda", cpu_threads=2) == 0.0
    assert runner.asked == []


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (
            {"free_data_per_s": 150.0, "cores_per_s": 100.0, "decode_per_s": 140.0},
            "Fed at 97 % of what the cores can make: 97.0 of 100 samples/s; free data would give "
            "150, decoding alone would allow 140.",
        ),
        (
            {"free_data_per_s": 100.0, "cores_per_s": 300.0, "decode_per_s": 400.0},
            "Fed at 97 % of what free data would give: 97.0 of 100 samples/s; the cores could make "
            "300.",
        ),
    ],
)
def test_a_reader_is_told_the_distance_and_which_limit_it_is(rates, expected):
    assert feeding_words(Feeding(samples_per_s=97.0, **rates)) == expected


def test_the_ablations_json_brings_it_back():
    feeding = Feeding(samples_per_s=97.0, free_data_per_s=150.0, cores_per_s=100.0)
    made = Ablation(workload="train.py", baseline=final(), feeding=feeding)

    assert ablation_from_json(made.to_json()).feeding == feeding
    assert made.to_json()["best"]["feeding"]["binds"] == "cores"
