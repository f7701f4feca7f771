"""The survey's decisions, on trials made up from a known truth; one on a real script."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from flatout.cli import call
from flatout.records.ablation import methods
from flatout.records.errors import UserError
from flatout.records.messages import LANGUAGES, messages
from flatout.records.profile import PeakBytes
from flatout.records.trial import Outcome, Trial
from flatout.reporting.survey import next_command, render_survey
from flatout.tuning.trial_runner import JOURNAL, open_journal
from flatout.workflow.survey import SurveyOptions, survey
from flatout.workflow.tune import BaselineFailedError
from tests.support.ordinary import check_document
from tests.workflow.test_tune import MACHINE, WORKLOAD, World

ARTICLE = {
    "batch_size": ("yes", "yes"),
    "accumulation": ("no", "yes"),
    "checkpointing": ("no", "yes"),
    "mixed_precision": ("yes", "maybe"),
    "empty_cache": ("no", "yes"),
    "optimizer": ("yes", "yes"),
    "data_preloading": ("yes", "no"),
    "zero": ("no", "yes"),
    "compile": ("yes", "no"),
    "peft": ("no", "yes"),
}
"""Method by method what the article's table says of speed and memory."""


class Memory(World):
    """A world in which checkpointing halves the peak."""

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if trial.profile is None or "activation_checkpointing" not in recipe.names:
            return trial
        return replace(trial, profile=replace(trial.profile, peak_bytes=PeakBytes(device=2**29)))


def run(world, tmp_path, *names, **options):
    chosen = tuple(method for method in methods() if not names or method.name in names)
    asked = SurveyOptions(out=tmp_path, **{"runner": world, "wait": lambda _: None} | options)
    with patch("flatout.workflow.survey.methods", lambda: chosen):
        return survey(WORKLOAD, asked, lambda _: None, MACHINE)


def rows(found):
    return {row.method: row for row in found.rows}


def test_the_ten_methods_of_the_article_come_in_its_order_with_what_it_says():
    known = {m.name: (m.faster, m.smaller) for m in methods() if m.faster}

    assert known == ARTICLE
    assert list(known) == list(ARTICLE)


def test_the_combinations_of_the_articles_are_rows_of_their_own():
    names = [method.name for method in methods() if not method.faster]

    assert names == [
        "precision_and_checkpointing",
        "precision_and_batch",
        "accumulation_and_warm_up",
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_method_has_a_name_in_every_language(language):
    assert all(f"method.{method.name}" in messages(language).texts for method in methods())


def test_a_method_is_measured_whether_or_not_it_helps(tmp_path):
    world = Memory({"activation_checkpointing": 1.3, "bf16_autocast": 0.5}, noise=0.001)

    survey_found = run(world, tmp_path, "checkpointing", "mixed_precision")
    found = rows(survey_found)

    check_document(survey_found.to_json())
    slow, fast = found["checkpointing"], found["mixed_precision"]
    assert (slow.status, slow.is_faster, slow.is_smaller) == ("measured", "no", "yes")
    assert slow.comparison.ratio == pytest.approx(1 / 1.3, rel=0.02)
    assert slow.peak_ratio == 0.5
    assert (fast.is_faster, fast.is_smaller) == ("yes", "same")
    assert fast.comparison.n >= 2


def test_each_method_is_alone_on_the_unchanged_script(tmp_path):
    world = World({})

    run(world, tmp_path, "checkpointing", "mixed_precision", "precision_and_checkpointing")

    recipes = {label.replace(" mode=blocks", "") for label in world.asked}
    assert any(label.startswith("activation_checkpointing") for label in recipes)
    assert "bf16_autocast" in recipes
    assert any(label.startswith("bf16_autocast + activation_checkpointing") for label in recipes)


def test_a_method_that_cannot_act_says_why_and_the_next_choice_is_taken(tmp_path):
    world = World({"adafactor": 0.9}, refused={"eight_bit_optimizer": "not_applicable"})

    row = rows(run(world, tmp_path, "optimizer"))["optimizer"]

    assert row.status == "measured"
    assert row.recipe.names == ("adafactor",)


def test_a_method_of_which_nothing_can_act_is_impossible_with_the_reason(tmp_path):
    world = World({}, refused={"empty_cache_steps": "not_applicable"})

    row = rows(run(world, tmp_path, "empty_cache"))["empty_cache"]

    assert (row.status, row.comparison) == ("impossible", None)
    assert "no such" in row.why


def test_a_method_that_crashes_is_failed_and_the_others_go_on(tmp_path):
    world = World({}, broken=("torch_compile",))

    found = rows(run(world, tmp_path, "compile", "mixed_precision"))

    assert found["compile"].status == "failed"
    assert found["mixed_precision"].status == "measured"


def test_zero_is_predicted_and_never_run_on_one_device(tmp_path):
    world = World({})

    row = rows(run(world, tmp_path, "zero"))["zero"]

    assert row.status == "predicted"
    assert row.comparison is None
    assert row.peak_ratio < 1, "Adam's state is shared"
    assert set(world.asked) == {"baseline"}


def test_every_method_has_a_row_however_early_it_ends(tmp_path):
    world = World({}, interrupt_after=4)

    found = run(world, tmp_path)

    assert [row.method for row in found.rows] == [method.name for method in methods()]
    assert found.stopped == "interrupted"
    assert found.rows[-1].status == "not_measured"


def test_a_spent_budget_leaves_the_rest_unmeasured(tmp_path):
    found = run(World({}), tmp_path, clock=iter(range(0, 10**6, 100)).__next__)

    assert found.stopped == "budget"
    assert "ended early" in render_survey(found)


def test_a_prediction_costs_no_time_and_is_made_all_the_same(tmp_path):
    found = run(World({}), tmp_path, clock=iter(range(0, 10**6, 100)).__next__)

    assert rows(found)["zero"].status == "predicted"


def test_a_tuning_in_the_out_folder_is_not_overwritten(tmp_path):
    run(World({}), tmp_path, "empty_cache")
    run(World({}), tmp_path, "empty_cache")  # its own is
    header = {"records": 1, "workload": "train.py"}
    open_journal(tmp_path, header, resume=False)
    before = (tmp_path / JOURNAL).read_bytes()

    with pytest.raises(UserError, match="choose another --out"):
        run(World({}), tmp_path, "empty_cache")

    assert (tmp_path / JOURNAL).read_bytes() == before


def test_the_time_is_shared_out_so_that_a_slow_method_does_not_cost_the_others(tmp_path):
    elapsed = [0.0]
    world = World({})

    def slow(workload, recipe, machine, options):
        trial = replace(world(workload, recipe, machine, options), wall_s=20.0)
        elapsed[0] += trial.wall_s
        return trial

    found = run(slow, tmp_path, clock=lambda: elapsed[0], budget_s=600.0)

    assert found.stopped == "finished"
    assert min(row.comparison.n for row in found.rows if row.comparison) == 1
    assert {row.status for row in found.rows} == {"measured", "predicted"}


def test_a_script_that_does_not_run_is_no_survey(tmp_path):
    def crash(workload, recipe, machine, options):
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no")

    with pytest.raises(BaselineFailedError):
        run(crash, tmp_path)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_report_has_every_row_with_its_reason(tmp_path, language):
    world = World(
        {"bf16_autocast": 0.5},
        refused={"empty_cache_steps": "not_applicable", "microbatching": "not_applicable"},
    )
    found = run(world, tmp_path)
    say = messages(language)

    report = render_survey(found, language=language)

    assert all(say(f"method.{method.name}") in report for method in methods())
    assert report.count("no such") == 3
    assert next_command(found).startswith("flatout tune --only ")


def test_the_next_command_names_nothing_that_trains_something_else(tmp_path):
    found = run(World({"lora": 0.3}, noise=0.001), tmp_path, "peft")

    assert rows(found)["peft"].is_faster == "yes"
    assert next_command(found) == "flatout tune train.py"


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 32), torch.randint(0, 4, (512,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(500):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_a_real_script_is_surveyed(tmp_path, monkeypatch, capsys):
    chosen = tuple(m for m in methods() if m.name in {"mixed_precision", "empty_cache"})
    monkeypatch.setattr("flatout.workflow.survey.methods", lambda: chosen)
    # Not about noise: a busy machine must not leave the methods unmeasured.
    monkeypatch.setattr("flatout.tuning.experiments.disturbances", lambda *_: "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    code = call(["survey", "--budget", "2m", "--json", "s.json", "--accept-load", "train.py"])

    assert code == 0, capsys.readouterr().err
    found = {row["method"]: row for row in json.loads((tmp_path / "s.json").read_text())["rows"]}
    assert found["mixed_precision"]["status"] == "measured"
    assert found["mixed_precision"]["comparison"]["n"] >= 1  # a busy machine makes no more
    assert found["empty_cache"]["status"] == "impossible"
    assert "keeps no cache" in found["empty_cache"]["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flatout-survey",
        "s.json",
        "train.py",
    ]
