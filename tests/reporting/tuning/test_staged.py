from dataclasses import replace
from xml.etree import ElementTree

import pytest

from flatout.records.ablation import (
    Comparison,
    StagedRow,
    TrainingLength,
    Verdict,
    ablation_from_json,
    staged_row,
)
from flatout.records.profile import RareWork
from flatout.records.recipe import Choice
from flatout.reporting.tuning.speedup_chart import staged_svg
from flatout.reporting.tuning.staged import columns_of, training_s
from flatout.reporting.tuning.text import ablation_html, ablation_markdown, render_ablation

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def staged(tuned):
    """A tuning whose recipe was measured as it grew."""
    workers = StagedRow(
        technique="loader_workers num_workers=2",
        promise="exact",
        alone=1.62,
        alone_source="pairs",
        samples_per_s=244.7,
        utilisation=0.6,
        peak_bytes=1_460_288_880,
        source="pairs",
    )
    bf16 = replace(
        workers,
        technique="bf16_autocast",
        promise="precision",
        alone=1.1,
        alone_source="screen",
        samples_per_s=243.0,
        utilisation=0.95,
        source="run",
    )
    first = staged_row(tuned.baseline, "pairs")
    last = staged_row(tuned.final, "pairs", technique="regional_compile", promise="rounding")
    length = TrainingLength(steps=2200, source="--epochs 100")
    return replace(tuned, stages=(first, workers, bf16, last), training=length)


def test_the_picture_has_a_bar_a_step_with_what_the_table_says(staged):
    root = ElementTree.fromstring(staged_svg(staged))
    groups = root.findall(f"{SVG}g")
    shown = [[text.text for text in group.findall(f"{SVG}text")] for group in groups]
    length = [float(group.find(f"{SVG}rect").get("width")) for group in groups]

    assert shown[0] == ["baseline", "1.00x, 37 % busy, 7.8 min"]
    assert shown[1][0] == "loader_workers"
    assert [name for name, _ in shown] == [
        *("baseline", "loader_workers", "bf16_autocast", "regional_compile"),
    ]
    speeds = [stage.samples_per_s / staged.stages[0].samples_per_s for stage in staged.stages]
    assert [one / length[0] for one in length] == pytest.approx(speeds, rel=0.005)
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text


def test_the_page_has_the_picture_with_the_table(staged):
    page = ablation_html(staged)

    assert page.count("<svg") == 2
    assert staged_svg(staged) in page


def test_the_picture_is_korean_where_the_report_is(staged):
    text = staged_svg(staged, "ko")

    assert "가동률 60 %" in text
    assert "busy" not in text


def test_there_is_no_picture_where_no_recipe_was_proven(tuned):
    assert staged_svg(tuned) is None


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_report_with_the_staged_table(staged, language, snapshot):
    report = render_ablation(staged, language=language)

    assert report == snapshot
    assert len(report.splitlines()) <= 25


def not_kept(staged, *rows):
    text = " ".join(render_ablation(replace(staged, rows=rows)).split())
    return text.partition("Not kept: ")[2].partition(". - ")[0]


def test_what_is_in_the_recipe_is_not_called_not_kept_for_an_earlier_trial(staged):
    kept = staged.rows[0]
    before = replace(kept, verdict=Verdict.INCONCLUSIVE)
    more = replace(before, choice=replace(kept.choice, settings={"num_workers": 9}))

    assert kept.choice in staged.recipe.choices
    assert not_kept(staged, before, kept) == ""
    assert not_kept(staged, kept, more) == "loader_workers num_workers=9 1.62x (inconclusive)"


def test_what_was_tried_twice_is_named_once_and_what_was_tried_as_one_together(staged):
    fused = replace(
        staged.rows[0],
        choice=Choice(technique="fused_optimizer"),
        verdict=Verdict.INCONCLUSIVE,
        comparison=Comparison(ratio=1.03, interval=(0.9, 1.2), n=4),
    )
    joint = replace(fused, together_with=("channels_last",), verdict=Verdict.NO_EFFECT)

    assert not_kept(staged, fused, joint, replace(fused, verdict=Verdict.NO_EFFECT)) == (
        "fused_optimizer 1.03x (no difference), "
        "fused_optimizer + channels_last 1.03x (no difference)"
    )


def test_a_long_recipe_leaves_less_of_the_rest(staged):
    more = [replace(staged.stages[1], technique=f"technique_{n}") for n in range(5)]
    report = render_ablation(replace(staged, stages=(*staged.stages, *more)))

    assert len(report.splitlines()) <= 25
    assert "report.md and --details have the reasons" in report
    assert "technique_4" in report


def test_the_demo_puts_the_figures_of_the_article_next_to_its_own(staged):
    report = " ".join(render_ablation(staged, with_article=True).split())

    assert "The article: 35 % to 95 % utilisation, 120 to 50 minutes (2.40x)." in report
    assert "Here: 37 % to 50 %, 2.10x." in report


def test_a_step_that_is_busier_and_no_faster_is_named(staged):
    assert "Busy is not speed: with bf16_autocast" in render_ablation(staged)

    faster = replace(staged.stages[2], samples_per_s=300.0)
    stages = (*staged.stages[:2], faster, staged.stages[3])

    assert "Busy is not speed" not in render_ablation(replace(staged, stages=stages))


def test_a_step_that_is_slower_alone_is_said_to_gain_by_those_above_it(staged):
    slow = replace(staged.stages[2], alone=0.81, alone_source="run", samples_per_s=300.0)
    stages = (*staged.stages[:2], slow, staged.stages[3])
    said = "bf16_autocast is slower alone and faster on top of the steps above it."

    assert said in " ".join(render_ablation(replace(staged, stages=stages)).split())
    assert said not in " ".join(render_ablation(staged).split())


def test_without_a_known_length_the_minutes_are_those_of_a_million_samples(staged):
    unknown = replace(staged, training=None)

    assert "minutes_per_million" in columns_of(unknown)
    report = render_ablation(unknown)
    assert "attempts" not in report
    rate = staged.stages[0].samples_per_s
    assert f" {1e6 / rate / 60:.0f} " in report


def with_rare_work(ablation, saving_share=0.0):
    rare = RareWork(share=0.2, ms=900.0, steps=2, of_steps=18, saving_share=saving_share)
    return replace(ablation, baseline=replace(ablation.baseline, rare=rare))


def test_work_of_some_steps_is_in_the_minutes_and_gets_no_faster(staged):
    known = with_rare_work(staged)

    for stage in staged.stages:
        # 100 ms for each of 2,200 steps.
        assert training_s(known, stage) == pytest.approx(training_s(staged, stage) + 220)


def test_saving_is_not_in_the_minutes_as_the_report_says(staged):
    known = with_rare_work(staged, saving_share=0.5)

    assert training_s(known, staged.stages[0]) == pytest.approx(
        training_s(staged, staged.stages[0]) + 110
    )


def test_what_the_whole_run_gains_is_said_where_other_work_is_a_part_of_it(staged):
    assert "evaluation or work of some steps" not in render_ablation(staged)

    known = with_rare_work(staged)
    whole = 1 / (0.2 + 0.8 / staged.confirmation.ratio)
    report = " ".join(render_ablation(known).split())

    assert "20 % of the run seen is evaluation or work of some steps only" in report
    assert f"the whole run is {whole:.2f}x as fast" in report
    assert len(render_ablation(known).splitlines()) <= 25


def test_a_gpu_is_shown_by_its_gpu_util_and_a_cpu_by_its_busy_share(staged):
    on_gpu = replace(staged.baseline, device_kind="cuda", gpu_util_share=0.4)

    assert "cpu_busy" in columns_of(staged)
    assert "gpu_util" in columns_of(replace(staged, baseline=on_gpu))


def test_what_was_not_measured_is_a_dash_in_every_form(staged):
    unknown = StagedRow(technique="bf16_autocast", promise="precision")
    some = replace(staged, stages=(*staged.stages[:2], unknown, staged.stages[3]))

    row = next(x for x in render_ablation(some).splitlines() if x.startswith("bf16_autocast"))
    assert row.split() == ["bf16_autocast", "-", "-", "-", "-", "-", "-", "precision"]


def test_the_table_is_in_the_page_in_markdown_and_in_the_details(staged):
    assert "<h2>Step by step to the recipe</h2>" in ablation_html(staged)
    assert "## Step by step to the recipe" in ablation_markdown(staged)
    report = render_ablation(staged, details=True, width=130)
    assert "attempts" in report
    assert "confirmed" in report


def test_the_table_is_in_the_json_and_comes_back(staged):
    again = ablation_from_json(staged.to_json())

    assert again.stages == staged.stages
    assert again.training == staged.training


def test_a_tuning_without_a_recipe_has_no_such_table(leave):
    assert "attempts" not in render_ablation(leave, details=True)
