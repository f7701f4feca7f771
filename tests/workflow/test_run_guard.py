"""A real training beside its plan, and what comes after memory ran out: fresh processes."""

import json
import shutil
from dataclasses import replace

import pytest

from flatout.cli import call
from flatout.records.errors import UserError
from flatout.records.plan import Amount, NumberSource, Plan, Rung
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.run import (
    RunOptions,
    next_recipes,
    read_plan,
    run,
    tell_exhaustion,
)
from tests.paths import ROOT
from tests.support.programs import workload_of

HUNGRY = ROOT / "tests/scripts/whole/hungry.py"
MIB = 2**20


def amount(size):
    return Amount(bytes=size, source=NumberSource.TRACED)


def rung(*choices, **changes):
    known = Rung(choices=choices, peak_bytes=1, saved_bytes=512 * MIB, time_ratio=1.25, fits=True)
    return replace(known, **changes)


def write_plan(folder, *ladder, allocated=3 * MIB, capacity=2 * MIB):
    plan = Plan(
        target="hungry.py",
        device="an H200",
        capacity_bytes=capacity,
        batch=64,
        allocated=amount(allocated),
        reserved=amount(2 * allocated),
        used=amount(3 * allocated),
        components={},
        peak_phase="backward",
        ladder=ladder,
    )
    path = folder / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    return path


def hungry(folder, command=""):
    shutil.copy(HUNGRY, folder / "hungry.py")
    return workload_of(folder, "hungry.py", *command.split())


def test_the_second_step_is_held_against_the_plan(tmp_path, capfd):
    plan = read_plan(write_plan(tmp_path))

    code = run(hungry(tmp_path, "--steps 4"), Recipe(), RunOptions(plan=plan))

    line = next(x for x in capfd.readouterr().err.splitlines() if "memory of step 2" in x)
    assert code == 0
    assert "planned 3.0 MiB" in line
    assert line.endswith("for an H200")
    # The data are 4.00 MiB, parameters, gradients and two moments of 265k scalars 4.04 MiB.
    measured = float(line.partition("allocated ")[2].split()[0])
    assert 8.1 < measured < 11


def test_without_a_plan_nothing_is_said(tmp_path, capfd):
    run(hungry(tmp_path, "--steps 4"), Recipe())

    assert "flatout:" not in capfd.readouterr().err


@pytest.mark.chaos
@pytest.mark.parametrize("step", [3, 9])
def test_out_of_memory_says_where_and_what_would_have_fit(tmp_path, capfd, step):
    plan = read_plan(write_plan(tmp_path, rung("activation_checkpointing mode=full")))

    code = run(hungry(tmp_path, f"--fails-at {step}"), Recipe(), RunOptions(plan=plan))

    said = capfd.readouterr().err
    assert code == 1
    assert f"flatout: out of memory in other of step {step};" in said
    assert (
        "by the plan these would have fit: activation_checkpointing mode=full "
        "(saves 512.0 MiB, 1.25x the time)"
    ) in said
    assert "--on-oom adapt" in said


def test_a_plan_that_was_wrong_is_doubted(tmp_path, capsys):
    plan = read_plan(write_plan(tmp_path, capacity=2**30))

    tell_exhaustion("in forward of step 1", plan, "hungry.py")

    said = capsys.readouterr().err
    assert (
        "by the plan it fits: 6.0 MiB reserved on an H200; is that a plan of this command" in said
    )


def test_without_a_plan_the_command_that_makes_one_is_named(capsys):
    tell_exhaustion("in forward of step 1", None, "hungry.py --steps 4")

    assert "'flatout plan hungry.py --steps 4' says it" in capsys.readouterr().err


def test_korean_runs_say_it_in_korean(tmp_path, capsys):
    plan = read_plan(write_plan(tmp_path, capacity=2**30))

    for known in (plan, None):
        tell_exhaustion("", known, "hungry.py", "ko")

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(any("\uac00" <= letter <= "\ud7a3" for letter in line) for line in lines)


@pytest.mark.slow
@pytest.mark.chaos
def test_it_starts_again_in_a_fresh_process_where_the_script_resumes(tmp_path, capfd):
    plan = read_plan(write_plan(tmp_path, rung("activation_checkpointing mode=full")))
    options = RunOptions(plan=plan, adapts=True, resume_arguments=("--resume", "last.pt"))

    code = run(hungry(tmp_path, "--fails-at 3 --steps 6"), Recipe(), options)

    out, said = capfd.readouterr()
    assert code == 0
    assert out.splitlines() == ["begin at step 0", "begin at step 2", "done after step 6"]
    assert "starting again in a fresh process with activation_checkpointing mode=full" in said
    assert "as: python hungry.py --fails-at 3 --steps 6 --resume last.pt" in said


@pytest.mark.slow
@pytest.mark.chaos
def test_without_resume_arguments_it_says_that_it_begins_anew(tmp_path, capfd):
    recipe = Recipe(choices=(Choice(technique="fused_optimizer"),))

    code = run(hungry(tmp_path, "--fails-at 2 --steps 3"), recipe, RunOptions(adapts=True))

    out, said = capfd.readouterr()
    assert code == 0
    assert out.count("begin at step 0") > 1
    assert "--resume-args says how it resumes" in said
    assert "fresh process with fused_optimizer + chunked_cross_entropy" in said


@pytest.mark.chaos
def test_another_failure_is_no_reason_to_start_again(tmp_path, capfd):
    code = run(hungry(tmp_path, "--resume nowhere.pt"), Recipe(), RunOptions(adapts=True))

    out, said = capfd.readouterr()
    assert code == 1
    assert out.count("begin") == 0
    assert "flatout:" not in said


def test_the_plans_ways_come_first_and_only_those_that_fit_and_train_the_same(tmp_path):
    plan = read_plan(
        write_plan(
            tmp_path,
            rung("adafactor", changes_training=True),
            rung("microbatching chunks=2", fits=False),
            rung("batch=4 accumulate=2 (by hand)"),
            rung("microbatching chunks=8", "optimizer_in_backward"),
        )
    )

    first, *rest = next_recipes(Recipe(), plan)

    assert first.label == "microbatching chunks=8 + optimizer_in_backward"
    assert rest[0].names == ("chunked_cross_entropy",)
    assert [len(each.choices) for each in rest] == sorted(len(each.choices) for each in rest)


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        (
            "activation_checkpointing mode=budget fraction=0.25",
            {"mode": "budget", "fraction": 0.25},
        ),
        ("microbatching chunks=8 splits_batch_norm=True", {"chunks": 8, "splits_batch_norm": True}),
        ("optimizer_in_backward", {}),
    ],
)
def test_a_label_becomes_the_choice_that_it_came_from(label, settings):
    choice = Choice.from_label(label)

    assert choice.settings == settings
    assert choice.label == label


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"device": "x", "allocated": 3}'])
def test_what_is_no_plan_is_refused_with_where_to_get_one(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(UserError, match="'flatout plan --json' writes one"):
        read_plan(path)


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read the plan"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.slow
@pytest.mark.chaos
def test_the_command_takes_it_all_without_a_recipe(tmp_path, capfd, monkeypatch):
    hungry(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = write_plan(tmp_path, rung("activation_checkpointing mode=full"))
    flags = ["--plan", str(plan), "--on-oom", "adapt", "--resume-args", "--resume last.pt"]

    code = call(["run", *flags, "hungry.py", "--fails-at", "3", "--steps", "4"])

    assert code == 0
    assert "done after step 4" in capfd.readouterr().out
