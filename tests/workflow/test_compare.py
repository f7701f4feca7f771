import json
import math
from dataclasses import replace

import pytest

from flatout.records.ablation import Comparison, ablation_from_json
from flatout.records.errors import UserError
from flatout.records.profile import profile_from_json
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.tuning.text import render_contrast
from flatout.workflow.compare import compare
from tests.paths import ROOT

DATA = ROOT / "tests/reporting/data"


def stored(name):
    return json.loads((DATA / f"{name}.json").read_text())


def tuned(**changes):
    return replace(ablation_from_json(stored("ablation_tuned")), **changes).to_json()


def starved(**changes):
    return replace(profile_from_json(stored("profile_starved")), **changes).to_json()


def with_step_ms(median):
    step = profile_from_json(stored("profile_starved")).step_ms
    return replace(step, median=median)


def test_a_profile_with_half_the_step_time_is_twice_as_fast():
    contrast = compare(starved(step_ms=with_step_ms(200.0)), starved(step_ms=with_step_ms(100.0)))

    assert contrast.ratio == 2.0
    assert contrast.meaning == "the baseline's speed, by step time"


def test_the_epoch_s_start_counts_in_the_step_time():
    slow_start = starved(epoch_start_ms=62 * 212.4, epoch_steps=62)

    assert compare(starved(), slow_start).ratio == pytest.approx(0.5)


def test_two_single_runs_have_no_interval_and_say_so():
    contrast = compare(starved(), starved())

    assert contrast.interval is None
    assert not contrast.covers_one
    assert "no interval: that needs 2 fresh processes of each" in contrast.notes[0]


def test_two_processes_of_each_give_an_interval():
    slow = starved(process_steps_ms=[200.0, 204.0, 202.0])
    fast = starved(process_steps_ms=[101.0, 99.0])

    contrast = compare(slow, fast)

    assert contrast.ratio == pytest.approx(2.02, rel=0.01)
    assert contrast.interval[0] < 2.02 < contrast.interval[1]
    assert contrast.interval[0] > 1.5
    assert contrast.n == (3, 2)
    assert not any("no interval" in note for note in contrast.notes)


def test_one_process_on_one_side_gives_none_and_both_counts_are_named():
    contrast = compare(starved(process_steps_ms=[200.0, 204.0]), starved())

    assert contrast.interval is None
    assert "hold 2 and 1" in contrast.notes[0]


def test_noise_between_processes_makes_it_no_difference():
    noisy = [200.0, 230.0, 210.0]

    contrast = compare(starved(process_steps_ms=noisy), starved(process_steps_ms=noisy[::-1]))

    assert contrast.covers_one


def test_the_interval_of_another_batch_is_that_of_the_samples():
    single = starved(process_steps_ms=[100.0, 101.0])
    double = starved(samples_per_step=64.0, samples_per_s=301.32, process_steps_ms=[100.0, 101.0])

    contrast = compare(single, double)

    assert contrast.ratio == pytest.approx(2.0)
    assert contrast.interval[0] < 2.0 < contrast.interval[1]


def test_steps_of_another_size_are_compared_by_samples():
    doubled = starved(samples_per_step=64.0, samples_per_s=301.32)

    contrast = compare(starved(), doubled)

    assert contrast.ratio == pytest.approx(2.0)
    assert contrast.meaning == "the baseline's speed, by samples/s"
    assert "they differ in samples a step: 32 against 64" in contrast.notes


def test_a_measurement_that_must_not_be_trusted_is_told_first():
    busy = starved(invalid=("other processes took 87 % of the cores",))

    notes = compare(starved(), busy).notes

    assert notes[0] == "do not trust the candidate: other processes took 87 % of the cores"
    assert not [note for note in compare(starved(), starved()).notes if "trust" in note]


def test_another_device_is_told():
    contrast = compare(starved(), starved(device_name="Other CPU"))

    assert "they differ in device: Test CPU against Other CPU" in contrast.notes


def test_two_tunings_are_compared_by_their_gains():
    half = Comparison(ratio=1.5, interval=(1.4, 1.6), n=4)

    contrast = compare(tuned(), tuned(confirmation=half))

    assert contrast.ratio == pytest.approx(1.5 / 2.105)
    assert contrast.n == (5, 4)
    assert not contrast.covers_one


def test_widths_of_independent_intervals_add_in_squares():
    pair = Comparison(ratio=2.0, interval=(2.0 / 1.1, 2.0 * 1.1), n=5)

    low, high = compare(tuned(confirmation=pair), tuned(confirmation=pair)).interval

    assert math.log(high) == pytest.approx(math.sqrt(2) * math.log(1.1))
    assert low * high == pytest.approx(1.0)


def test_a_tuning_that_changed_nothing_has_a_gain_of_one():
    contrast = compare(tuned(), stored("ablation_leave"))

    assert contrast.ratio == pytest.approx(1 / 2.105)
    assert contrast.n == (5, 0)


def test_a_recipe_that_was_given_up_gains_nothing():
    assert compare(stored("ablation_leave"), tuned(recipe=Recipe())).ratio == 1.0


@pytest.mark.parametrize("confirmation", [None, Comparison(ratio=1.3, interval=(1.2, 1.4), n=3)])
def test_a_tuning_that_kept_only_what_its_script_needs_gains_nothing(confirmation):
    needed = Recipe(choices=(Choice(technique="loader_workers"),))
    found = {"recipe": needed, "needed": ("loader_workers",), "confirmation": confirmation}

    contrast = compare(stored("ablation_leave"), tuned(**found, stopped="finished"))

    assert (contrast.ratio, contrast.n) == (1.0, (0, 0))


def test_an_end_after_a_recipe_was_given_up_leaves_it_given_up():
    given_up = tuned(recipe=Recipe(), stopped="interrupted")

    assert compare(stored("ablation_leave"), given_up).ratio == 1.0


@pytest.mark.parametrize("stopped", ["interrupted", "machine busy", "busy budget"])
def test_a_tuning_that_was_not_let_find_anything_is_refused(stopped):
    with pytest.raises(UserError, match=r"before its recipe was confirmed.*--resume"):
        compare(tuned(), tuned(recipe=Recipe(), confirmation=None, stopped=stopped))


def test_a_gain_without_an_interval_gives_none():
    pair = Comparison(ratio=2.0, interval=(0.0, math.inf), n=1)

    assert compare(tuned(), tuned(confirmation=pair)).interval is None


def test_an_unconfirmed_tuning_is_refused():
    with pytest.raises(UserError, match=r"before its recipe was confirmed.*--resume"):
        compare(tuned(), tuned(confirmation=None, stopped="interrupted"))


def test_the_page_shows_what_is_printed():
    contrast = compare(stored("profile_starved"), stored("ablation_tuned")["best"]["profile"])

    text = render_contrast(contrast, baseline="before.json", candidate="after.json")

    assert text in (DATA.parents[2] / "docs/commands/compare.md").read_text()


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ({}, {}, "schema None"),
        ({"schema": "flatout.plan/1"}, {}, r"schema 'flatout\.plan/1'"),
        (starved(), tuned(), "give two of the same kind"),
        ({"schema": "flatout.profile/1"}, starved(), "does not hold one"),
    ],
)
def test_what_cannot_be_compared_is_refused(a, b, words):
    with pytest.raises(UserError, match=words):
        compare(a, b)
