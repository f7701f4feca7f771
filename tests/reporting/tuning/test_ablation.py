import math
import re
from dataclasses import replace

import pytest

from flatout.records.ablation import Comparison, Feeding, LossCheck, Verdict
from flatout.records.messages import joined, messages, words
from flatout.records.profile import Ceilings
from flatout.records.readings import Consumer, TraceEntry, TraceSummary
from flatout.records.recipe import Choice, Recipe
from flatout.reporting.tuning.text import render_ablation
from flatout.reporting.tuning.verdict import fed, reasons

ENGLISH = messages("en")


def first_line(ablation):
    return " ".join(render_ablation(ablation, details=True).split("\n\n")[0].split())


def row_of(text, technique):
    return next(line for line in text.splitlines() if line.startswith(technique))


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_of_a_tuning(tuned, snapshot, width):
    assert render_ablation(tuned, width=width, details=True) == snapshot


def test_the_report_of_a_tuning_that_leaves_it(leave, snapshot):
    assert render_ablation(leave, details=True) == snapshot


def test_the_short_report_of_a_tuning(tuned, snapshot):
    assert render_ablation(tuned) == snapshot


def test_a_short_report_has_what_was_kept_and_25_lines_with_the_files(tuned):
    tried = replace(tuned.rows[-1], verdict=Verdict.NO_EFFECT)
    many = replace(tuned, rows=(*tuned.rows, *[tried] * 40), notes=("a long note " * 30,) * 5)

    lines = render_ablation(many).splitlines()

    rows = [line.split()[0] for line in lines[5:] if line[:1].strip()]
    assert len(lines) <= 24
    assert {"loader_workers", "bf16_autocast", "regional_compile"} <= set(rows)
    assert "more techniques were not kept" in " ".join(lines)
    assert lines[-1] == ("next  flatout run --with flatout-out/recipe.toml train.py --epochs 3")


def test_no_answer_names_the_recipe_whose_race_looks_best(leave):
    race = replace(
        leave.rows[0],
        verdict=Verdict.INCONCLUSIVE,
        comparison=Comparison(ratio=1.32, interval=(0.98, 1.77), n=2),
        together_with=("sdpa_attention",),
    )

    line = " ".join(first_line(replace(leave, rows=(race,), stopped="budget")).split())

    assert line.startswith("No answer yet")
    assert "; fused_optimizer + sdpa_attention looks like 1.32x" in line


def test_where_room_is_short_what_is_nearest_to_a_proof_is_shown(leave):
    vague = replace(leave.rows[0], comparison=Comparison(ratio=1.0, interval=(0.8, 1.2), n=2))
    near = replace(
        leave.rows[0],
        choice=Choice(technique="channels_last"),
        comparison=Comparison(ratio=1.19, interval=(1.07, 1.32), n=8),
    )

    text = render_ablation(replace(leave, rows=(*[vague] * 40, near)))

    assert row_of(text, "channels_last")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(tuned, width):
    text = render_ablation(tuned, width=width, details=True)

    assert max(map(len, text.splitlines())) <= width


def test_an_interval_that_covers_one_is_no_difference(leave):
    assert row_of(render_ablation(leave, details=True), "fused_optimizer").endswith("no difference")


@pytest.mark.parametrize(
    ("ratio", "interval", "said"),
    [(1.012, (1.005, 1.019), "too small"), (2.37, (2.36, 2.38), "outdone")],
)
def test_a_gain_that_was_shown_and_is_not_kept_is_not_called_no_difference(
    leave, ratio, interval, said
):
    pair = Comparison(ratio=ratio, interval=interval, n=6)
    rows = (replace(leave.rows[0], comparison=pair),)

    text = render_ablation(replace(leave, rows=rows), details=True)

    assert row_of(text, "fused_optimizer").endswith(said)


def test_a_recipe_that_was_not_confirmed_is_not_called_faster(tuned):
    unconfirmed = replace(tuned, confirmation=None, final=None, stopped="interrupted")

    line = first_line(unconfirmed)

    assert line.startswith("Not confirmed yet")
    assert "interrupted" in line
    assert "flatout tune --resume --out flatout-out" in render_ablation(unconfirmed, details=True)


def test_a_confirmation_that_covers_one_is_not_called_faster(tuned):
    pair = Comparison(ratio=1.1, interval=(0.98, 1.23), n=3)

    line = first_line(replace(tuned, confirmation=pair))

    assert line.startswith("Not faster")
    assert "no difference" in line


def test_a_recipe_that_was_given_up_says_so(tuned):
    given_up = replace(tuned, recipe=Recipe(), final_check=LossCheck(status="rejected"))

    text = render_ablation(given_up, details=True)

    assert first_line(given_up).startswith("Leave it as it is")
    assert row_of(text, "whole recipe").endswith("not confirmed")
    assert text.endswith("next  python train.py --epochs 3\n")


def test_training_that_was_not_compared_is_not_called_the_same(tuned):
    unchecked = replace(tuned, final_check=LossCheck(status="not_compared"))

    assert "training not proven the same" in first_line(unchecked)


def test_an_interval_without_an_end_is_unknown(tuned):
    pair = Comparison(ratio=1.5, interval=(0.0, math.inf), n=1, resolution=math.inf)
    rows = (replace(tuned.rows[0], comparison=pair, verdict=Verdict.INCONCLUSIVE),)

    text = render_ablation(replace(tuned, rows=rows, resolution=math.inf), details=True)

    assert "inf" not in text.replace("inconclusive", "")
    assert "Resolution unknown" in text


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (
            "budget",
            "No answer yet: 2 techniques tried, none kept, and the budget left no time for more.",
        ),
        ("machine busy", "other work kept the machine busy"),
    ],
)
def test_an_early_end_without_a_result_is_no_answer(leave, stopped, words):
    assert words in first_line(replace(leave, stopped=stopped))


def test_an_early_end_names_what_more_pairs_would_be_for(leave):
    shown = Comparison(ratio=1.14, interval=(0.98, 1.3), n=6, blocks=9)
    vague = Comparison(ratio=1.22, interval=(0.94, 1.59), n=2)
    rows = tuple(
        replace(row, verdict=Verdict.INCONCLUSIVE, comparison=pair)
        for row, pair in zip(leave.rows, (shown, vague), strict=True)
    )
    label = rows[0].choice.label

    text = first_line(replace(leave, stopped="budget", rows=rows))

    proof = "(95% interval 0.98-1.30, n=6 pairs and 9 blocks of steps)"
    assert f"{label} looks like 1.14x {proof}, which is not proven" in text


def test_compiling_shows_when_it_has_paid_for_itself(tuned):
    text = " ".join(render_ablation(tuned, details=True).split())

    assert "regional_compile needs 21 s more at the start" in text
    assert "after 1980 steps (31.9 epochs)" in text


def test_what_was_left_out_of_the_recipe_again_costs_nothing_at_the_start(tuned):
    cut = replace(tuned, recipe=tuned.recipe.without("regional_compile"))

    assert "more at the start" not in " ".join(render_ablation(cut, details=True).split())


def test_a_hostile_script_name_cannot_move_the_cursor(tuned):
    text = render_ablation(replace(tuned, workload="\x1b[2Jtrain\u2028.py"), details=True)

    assert text.isascii()
    assert "\x1b" not in text


def test_a_recipe_that_was_faster_than_its_limit_is_fed_and_no_more():
    feeding = Feeding(samples_per_s=102.0, free_data_per_s=150.0, cores_per_s=100.0)

    text = ENGLISH.text(fed(feeding))

    assert "102 %" not in text
    assert text.startswith("Fed: 102 samples/s, no less than what the cores can make (100);")


def test_where_another_recipe_was_faster_that_is_said_and_not_that_this_one_is_fed(tuned):
    feeding = Feeding(samples_per_s=100.0, free_data_per_s=100.0, cores_per_s=150.0)
    rows = (replace(tuned.rows[0], samples_per_s=124.0),)

    told = "\n".join(map(ENGLISH.text, reasons(replace(tuned, feeding=feeding, rows=rows))))

    assert "Fed" not in told
    assert f"Data is not all: with {rows[0].choice.technique} (" in told
    assert "it made 124 samples/s." in told


@pytest.mark.parametrize("interval", [(0.97, 1.04), (0.90, 0.95)])
def test_a_recipe_that_is_no_faster_is_not_what_to_run_next(tuned, interval):
    pair = Comparison(ratio=sum(interval) / 2, interval=interval, n=6)
    text = render_ablation(replace(tuned, confirmation=pair, needed=()), details=True)

    assert text.startswith("Not faster")
    assert text.splitlines()[-1] == f"next  python {tuned.workload}"


def test_much_to_gain_from_data_is_not_called_nothing_worth_changing(leave):
    ceilings = Ceilings(free_data=9.0, compute_only=9.0)
    text = first_line(replace(leave, baseline=replace(leave.baseline, ceilings=ceilings)))

    assert text.startswith("No gain found: 2 techniques tried")
    assert "up to 9.00x" in text


REASONS = (
    words("row.not_alone", technique="bf16_autocast"),
    words("screen.failed_together", why=words("trial.not_finite", step="3")),
    joined(words("guard.not_finite"), words("row.guard_rejects", techniques="bf16_autocast")),
)
NOTES = (
    words("tune_note.not_confirmed", recipe="bf16_autocast", why=REASONS[1]),
    words("tune_note.time_needed", one="10 s", proof="3 min", another="1 min"),
    words("scan.none_better", shown="2: 1.10x", n="4"),
    words("spread.taken", shown=(words("spread.too_small"),), way="ranks"),
)


@pytest.mark.parametrize("written", [lambda text: text, str], ids=["made", "read"])
def test_the_report_of_a_tuning_is_said_in_korean(tuned, leave, written):
    for ablation in (tuned, leave):
        rows = tuple(
            replace(row, why=written(REASONS[place % len(REASONS)]))
            for place, row in enumerate(ablation.rows)
        )
        check = LossCheck(status="within", why=written(words("guard.repeats", n="20")))
        own = replace(ablation, rows=rows, aa_check=check, notes=tuple(map(written, NOTES)))

        text = render_ablation(own, language="ko", width=120, details=True)

        assert not re.search(r"[a-z]+ (the|of|is|that|not|a|it) [a-z]+", text)
        assert text.splitlines()[-1].startswith(messages("ko")("label.next"))


def test_where_nothing_helps_the_places_that_take_the_most_are_named(leave):
    masks = TraceEntry(name="aten::bernoulli_", calls_per_step=6.0, ms_per_step=29.0, share=0.29)
    drop = Consumer(
        module="layers.*.drop (Dropout)", line="model.py:41", share=0.31, operators=(masks,)
    )
    slight = replace(drop, module="head (Linear)", share=0.001)
    trace = TraceSummary(steps=2, step_ms=100.0, consumers=(drop, slight))

    text = render_ablation(replace(leave, baseline=replace(leave.baseline, trace=trace)))

    assert "31 % in layers.*.drop (Dropout), model.py:41 (bernoulli_)" in " ".join(text.split())
    assert "head" not in text
