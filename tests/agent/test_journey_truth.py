"""A script that spends known times says how long they were; flatout has to find the same shares."""

import itertools
import json
import statistics
import sys

import pytest

from flatout.analysis.journey import SLACK_S
from flatout.analysis.steps import block_means
from flatout.hardware.machine import read_machine
from flatout.records.journey import TRAINING, WORKERS
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome, Workload
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

SCRIPT = ROOT / "tests/scripts/profiled/known_times.py"
TOLERANCE = 0.05
"""Of the known share."""
ROUNDING = 0.005
"""Of the step: what the clock, the hook points and the script's own log take in between."""
MADE_MS = {"read": 32.0, "decode": 20.0, "collate": 20.0}
LOOP_MS = {"h2d": 16.0, "forward": 16.0, "loss": 16.0, "optimizer": 16.0, "other": 16.0}
ALL = MADE_MS | LOOP_MS
ALONE = 30.0


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script with so many milliseconds a leg; return the profile and what it wrote."""
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    # A folder that holds a cache is one of those whose files outlive a trial.
    monkeypatch.setenv("TORCH_HOME", str(out))

    def run_script(ms, *arguments):
        told = [f"--{leg}={value}" for leg, value in ms.items()]
        workload = Workload(
            target=str(SCRIPT),
            arguments=(str(out), *told, *arguments),
            folder=work,
            python=sys.executable,
        )
        options = TrialOptions(limit_s=100.0, probes={"journey": {"copies": True}})
        trial = run_trial(workload, Recipe(), read_machine(torch=False), options)
        assert trial.outcome is Outcome.OK, trial.traceback
        assert trial.details["errors"] == []
        return trial.profile, out

    return run_script


PHASES = {
    "wait": ("read", "decode", "collate"),
    "forward": (),
    "backward": (),
    "optimizer": (),
    "other": ("h2d", "loss"),
}
"""What lies within what, in the script's own log."""


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(profile, out):
    """Return the script's rows from the one before the first measured step to the last."""
    rows = rows_of(out / "steps.jsonl")
    assert len(rows) == profile.warmup_steps + profile.step_ms.n
    return rows[profile.warmup_steps - 1 :]


def known_shares(profile, out, period=1):
    """Return each leg's share of the typical step by the script's own stopwatch.

    Of each phase the median, and of each leg in it, as the profile does: a step from which the
    core was taken away must not decide.
    """
    rows = measured(profile, out)
    steps = [{leg: b[leg] - a[leg] for leg in a} for a, b in itertools.pairwise(rows)]
    for step in steps:
        step["other"] = step["at"] - sum(step[phase] for phase in PHASES if phase != "other")
    typical = {leg: typical_of([step[leg] for step in steps], period) for leg in steps[0]}
    total = sum(typical[phase] for phase in PHASES)
    shares = {}
    for phase, parts in PHASES.items():
        rests = [step[phase] - sum(step[part] for part in parts) for step in steps]
        inside = {phase: typical_of(rests, period)} | {part: typical[part] for part in parts}
        whole = sum(inside.values())
        shares |= {leg: typical[phase] / total * s / whole for leg, s in inside.items()}
    return shares


def typical_of(seconds, period):
    return max(0.0, statistics.median(block_means(seconds, period)))


def known_worker_ms(profile, out):
    """Return each leg's milliseconds a batch in the workers, by the script's own stopwatch."""
    steps = measured(profile, out)
    began, ended = steps[0]["at"] - SLACK_S, steps[-1]["at"] + SLACK_S
    spent, batches = dict.fromkeys(MADE_MS, 0.0), 0
    for path in out.glob("worker-*.jsonl"):
        rows = [row for row in rows_of(path) if began <= row["at"] <= ended]
        batches += len(rows) - 1
        for leg in spent:
            spent[leg] += rows[-1][leg] - rows[0][leg]
    return {leg: 1e3 * value / batches for leg, value in spent.items()}


def legs(profile, where):
    return {leg.name: leg for leg in profile.journey.legs if leg.where == where}


def close(known, rounding=ROUNDING):
    return pytest.approx(known, rel=TOLERANCE, abs=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("leg", ALL)
def test_a_leg_that_takes_nearly_all_of_the_step_is_found(run, leg):
    profile, out = run({leg: ALONE})

    found = {name: facts.share for name, facts in legs(profile, TRAINING).items()}
    assert found[leg] == close(known_shares(profile, out)[leg])
    assert max(found, key=found.get) == leg


@pytest.mark.slow
def test_all_legs_together_are_told_apart_and_add_up_to_the_step(run):
    profile, out = run(ALL)

    found = legs(profile, TRAINING)
    known = known_shares(profile, out)
    assert {leg: found[leg].share for leg in ALL} == {leg: close(known[leg]) for leg in ALL}
    assert sum(leg.ms for leg in found.values()) == pytest.approx(profile.step_ms.median)
    assert sum(leg.share for leg in found.values()) == pytest.approx(1.0)
    assert found["h2d"].bytes_per_step == pytest.approx(4 * 8 * 4)
    assert [facts.number for facts in profile.journey.workers] == [-1]


@pytest.mark.slow
@pytest.mark.parametrize("leg", MADE_MS)
def test_workers_legs_are_found_each_alone(run, leg):
    profile, out = run({leg: 2 * ALONE}, "--workers=2")

    known_ms = known_worker_ms(profile, out)[leg]
    assert legs(profile, WORKERS)[leg].ms == close(known_ms, rounding=0.5)
    known = known_shares(profile, out, period=2)["wait"]
    assert legs(profile, TRAINING)["queue"].share == close(known)


@pytest.mark.slow
def test_a_leg_of_the_loop_is_found_alone_with_workers_beside_it(run):
    profile, out = run({"h2d": ALONE}, "--workers=2")

    known = known_shares(profile, out, period=2)["h2d"]
    assert legs(profile, TRAINING)["h2d"].share == close(known)


@pytest.mark.parametrize(
    "how",
    [
        (),
        ("--stream",),
        pytest.param(("--start=spawn",), marks=pytest.mark.slow),
        pytest.param(("--start=spawn", "--stream"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_all_legs_together_are_told_apart_with_workers(run, how):
    profile, out = run(ALL, "--workers=2", *how)

    theirs, loop = legs(profile, WORKERS), legs(profile, TRAINING)
    known_ms, known = known_worker_ms(profile, out), known_shares(profile, out, period=2)
    assert {leg: theirs[leg].ms for leg in MADE_MS} == {
        leg: close(known_ms[leg], rounding=0.5) for leg in MADE_MS
    }
    assert {leg: loop[leg].share for leg in LOOP_MS} == {leg: close(known[leg]) for leg in LOOP_MS}
    assert sum(leg.ms for leg in loop.values()) == pytest.approx(profile.step_ms.median)
    assert [facts.number for facts in profile.journey.workers] == [0, 1]
