"""What the table's last row says of the whole recipe."""

from dataclasses import replace

import pytest

from flatout.records.ablation import Comparison, Verdict
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.tuning.speedup_chart import ladder_rows


def row(tuned, technique, **facts):
    """Return the tuning's row on one technique, with other facts."""
    found = next(r for r in tuned.rows if r.choice.technique == technique and r.stage == "add")
    return replace(found, **facts)


def recipe_of(*names):
    return Recipe(choices=tuple(Choice(technique=name) for name in names))


def last_row(tuned, *rows, recipe, needed=()):
    return ladder_rows(replace(tuned, rows=rows, recipe=recipe, needed=needed))[-1]


@pytest.mark.parametrize("verdict", [Verdict.TOGETHER, Verdict.INCONCLUSIVE, Verdict.NO_EFFECT])
def test_its_promise_covers_a_technique_that_came_in_with_another(tuned, verdict):
    bf16 = row(tuned, "bf16_autocast", verdict=verdict)
    fused = row(tuned, "fused_optimizer", verdict=Verdict.KEPT)

    last = last_row(tuned, bf16, fused, recipe=recipe_of("bf16_autocast", "fused_optimizer"))

    assert last.promise == "precision"


def test_its_promise_is_not_that_of_a_technique_that_was_left_out_again(tuned):
    workers, bf16 = row(tuned, "loader_workers"), row(tuned, "bf16_autocast")
    dropped = replace(bf16, stage="drop", verdict=Verdict.NO_EFFECT)

    last = last_row(tuned, workers, bf16, dropped, recipe=recipe_of("loader_workers"))

    assert last.promise == "exact"


def test_a_technique_that_was_left_out_again_is_not_called_kept(tuned):
    workers, bf16 = row(tuned, "loader_workers"), row(tuned, "bf16_autocast")
    dropped = replace(bf16, stage="drop", verdict=Verdict.NO_EFFECT)
    found = replace(tuned, rows=(workers, bf16, dropped), recipe=recipe_of("loader_workers"))

    _, first, second, _ = ladder_rows(found)

    assert (first.verdict, first.is_kept) == ("kept", True)
    assert (second.verdict, second.is_kept) == ("left out", False)


def test_a_recipe_that_was_given_up_shows_the_promise_of_what_was_kept(tuned):
    bf16 = row(tuned, "bf16_autocast")

    last = last_row(tuned, bf16, recipe=Recipe())

    assert (last.promise, last.verdict) == ("precision", "not confirmed")


def test_what_the_script_cannot_run_without_does_not_confirm_a_recipe_that_was_given_up(tuned):
    workers, bf16 = row(tuned, "loader_workers"), row(tuned, "bf16_autocast")
    needed = recipe_of("loader_workers")

    last = last_row(tuned, workers, bf16, recipe=needed, needed=("loader_workers",))

    assert (last.promise, last.verdict, last.is_kept) == ("precision", "not confirmed", False)


def test_a_number_from_a_screen_is_told_apart_from_pairs(tuned):
    bf16 = row(tuned, "bf16_autocast")
    screened = replace(bf16, comparison=replace(bf16.comparison, n=24, source="screen"))

    rows = ladder_rows(replace(tuned, rows=(screened,)))

    assert rows[1].pairs == "24 blocks"
    assert rows[-1].pairs.isdigit()


def test_what_a_screen_did_not_keep_stands_on_all_that_it_kept(tuned):
    def screened(name, verdict, ratio, *others):
        pair = Comparison(ratio=ratio, interval=(ratio, ratio), n=9, source="screen")
        found = row(tuned, name, verdict=verdict, comparison=pair, on_top_of=others)
        return replace(found, together_with=())

    lost = screened("loader_workers", Verdict.NO_EFFECT, 0.98, "bf16_autocast")
    kept = screened("bf16_autocast", Verdict.KEPT, 2.0)

    _, first, second, _ = ladder_rows(replace(tuned, rows=(lost, kept)))

    assert first.times_baseline == pytest.approx(1.96)
    assert second.times_baseline == pytest.approx(2.0)
