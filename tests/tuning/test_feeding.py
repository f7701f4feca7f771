from dataclasses import dataclass, field, replace

import pytest

from flatout.records.ablation import Feeding
from flatout.records.messages import ENGLISH, messages
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Trial
from flatout.reporting.tuning.verdict import fed
from flatout.tuning.feeding import Costs, feeding_of, find_costs, note_prepared
from tests.rules.rank_facts import rank
from tests.techniques.facts import loader, machine, pipeline, profile
from tests.tuning.test_trial_runner import lab_of


def final(**changes):
    """Return a step of 100 ms for 10 samples."""
    return profile(loaders=(loader(),), samples_per_step=10.0, **changes)


def looked(**stages):
    return replace(pipeline(**stages), usable_cores=2)


def test_on_a_gpu_the_cores_make_samples_and_nothing_else():
    found = feeding_of(final(kind="cuda"), 50.0, looked(decode=5.0, transform=15.0), Costs())

    assert (found.samples_per_s, found.free_data_per_s) == (100, 200)
    assert (found.cores_per_s, found.decode_per_s) == (100, 400)
    assert (found.binds, found.share) == ("cores", 1.0)


def test_a_training_on_the_cpu_takes_its_part_of_the_cores():
    found = feeding_of(final(), 50.0, looked(decode=5.0, transform=10.0), Costs(trained_ms=50.0))

    assert found.trained_ms == 5.0
    assert (found.cores_per_s, found.decode_per_s) == (100, 200)


def test_where_the_cores_have_time_left_free_data_is_the_limit():
    found = feeding_of(final(kind="cuda"), 80.0, looked(python=1.0), Costs())

    assert (found.binds, found.share, found.decode_per_s) == ("free_data", 0.8, None)


def test_the_rates_are_those_of_all_ranks_together():
    ranks = (rank(0), rank(1))
    whole = replace(final(kind="cuda", ranks=ranks), samples_per_step=20.0)

    found = feeding_of(whole, 50.0, looked(decode=5.0, transform=15.0), Costs())

    # Each rank has two cores and trains on ten samples a step.
    assert (found.samples_per_s, found.free_data_per_s) == (200, 400)
    assert (found.cores_per_s, found.share) == (200, 1.0)


def test_a_rank_s_training_takes_from_a_rank_s_cores():
    whole = replace(final(ranks=(rank(0), rank(1))), samples_per_step=20.0)

    found = feeding_of(whole, 50.0, looked(decode=5.0, transform=10.0), Costs(trained_ms=50.0))

    assert found.trained_ms == 5.0
    assert found.cores_per_s == 200


def test_what_a_sample_takes_to_make_is_what_it_takes_beside_the_training():
    costs = Costs(trained_ms=50.0, made_ms=13.0)

    found = feeding_of(final(), 50.0, looked(decode=5.0, transform=5.0, transport=2.0), costs)

    # Sending a batch is no part of making it, and was seen on its own.
    assert (found.made_ms, found.cores_per_s, found.decode_per_s) == (15.0, 100, 200)


@dataclass
class Threaded:
    """Trains on free data, of which others make samples: 60 ms of a core a step on one thread."""

    draws_per_step: int = 1
    is_seen: bool = True
    asked: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, workload, recipe, machine, options):
        self.asked.append((recipe.label, options.probes["replay"]["company"]))
        step_s = [0.06 / self.draws_per_step] * self.draws_per_step
        # Between two steps the loop looked at other data, once.
        trained_s = [*step_s, *step_s, *(10 * x for x in step_s), *step_s] if self.is_seen else []
        seen = {"trained_s": trained_s, "made_samples": 200, "made_s": 3.0}
        found = replace(profile(), batches_per_step=float(self.draws_per_step))
        details = {"probes": {"replay": seen}}
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=found, details=details)


def costs(runner, folder, *, workers=0, **of_profile):
    lab = lab_of(folder, runner, usable_cores=2)
    phases = {"forward": 40.0, "backward": 20.0, "data_wait": 3.0}
    loaders = (replace(loader(), num_workers=workers),)
    seen = profile(phases_ms=phases, loaders=loaders, **of_profile)
    return lab.drive(find_costs(lab.history, Recipe(), seen))


def test_training_takes_from_the_cores_what_it_takes_on_one_thread(tmp_path):
    runner = Threaded()

    found = costs(runner, tmp_path, cpu_threads=2)

    assert (found.trained_ms, found.made_ms) == (pytest.approx(60.0), pytest.approx(15.0))
    assert runner.asked == [("cpu_threads threads=1", 1)]


def test_as_many_make_samples_beside_it_as_the_recipe_has_workers(tmp_path):
    runner = Threaded()

    costs(runner, tmp_path, workers=3, cpu_threads=1)

    assert runner.asked == [("baseline", 3)]


def test_a_step_of_several_batches_is_one_step(tmp_path):
    found = costs(Threaded(draws_per_step=3), tmp_path, cpu_threads=1)

    assert found.trained_ms == pytest.approx(60.0)


def test_where_it_is_not_seen_the_recipe_s_own_step_counts(tmp_path):
    found = costs(Threaded(is_seen=False), tmp_path, cpu_threads=8)

    assert (found.trained_ms, found.made_ms) == (120.0, None)


def test_another_device_takes_nothing_from_the_cores(tmp_path):
    runner = Threaded()

    assert costs(runner, tmp_path, kind="cuda", cpu_threads=2) == Costs()
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
            "Fed at 97 % of what free data would give this recipe: 97.0 of 100 samples/s; "
            "the cores could make 300.",
        ),
    ],
)
def test_a_reader_is_told_the_distance_and_which_limit_it_is(rates, expected):
    assert messages(ENGLISH).text(fed(Feeding(samples_per_s=97.0, **rates))) == expected


def images(wait_ms=80.0):
    """Return a step that waits for images, of whose making decoding is four fifths."""
    return replace(
        profile(phases_ms={"data_wait": wait_ms, "forward": 100.0 - wait_ms}, loaders=(loader(),)),
        pipeline=served(pipeline(read=0.5, decode=8.0, collate=1.5)),
    )


def served(found):
    stages = tuple(replace(x, techniques=techniques_of(x.name)) for x in found.stages)
    return replace(found, stages=stages)


def techniques_of(stage):
    return ("packed_data",) if stage in ("read", "decode") else ()


def test_a_store_that_could_be_made_is_named_where_the_step_still_waits():
    (note,) = note_prepared(Recipe(), images(), machine())

    assert note.startswith("50 % of the step still waits for data: packed_data is predicted")
    assert "flatout pack DATA data.packed" in note
    assert "80% of a sample's time is decoding" in note


@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        (Recipe(), images(wait_ms=5.0)),
        (Recipe(choices=(Choice(technique="packed_data", settings={"path": "x"}),)), images()),
        (Recipe(), replace(images(), pipeline=None)),
        (Recipe(), replace(images(), pipeline=pipeline(normalise=5.0, collate=5.0))),
    ],
)
def test_no_store_is_named_where_none_would_help(recipe, facts):
    assert note_prepared(recipe, facts, machine()) == []
