"""The loader's techniques in trials of a script.

Applied, with nothing failed, and under the guard.
"""

from functools import partial
from pathlib import Path

import pytest

from flatout.agent.guard.record import read_record
from flatout.guard.judge import judge
from flatout.guard.obstacles import Trials
from flatout.records.messages import code_of, messages
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import TECHNIQUE_NOTE, Outcome
from tests.paths import ROOT
from tests.support.trial_runs import recipe_of, run_alone

SCRIPT = ROOT / "tests/scripts/data/techniques.py"
GUARD = {"seed": 0, "drops_dropout": True, "drops_autocast": False}
trial_of = partial(run_alone, SCRIPT, limit_s=90.0, steps=12)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("plain", "2"), ("ram_cache", "read_ahead", "worker_threads")),
        (("tensors", "0"), ("loader_workers", "device_cache")),
        (("texts", "2"), ("ram_cache", "dynamic_padding", "length_buckets")),
    ],
    ids=lambda value: "-".join(value),
)
def test_techniques_are_applied_and_nothing_fails(arguments, names):
    trial = trial_of(arguments, recipe_of(*names))

    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert [(item.technique, item.status) for item in trial.applied] == [
        (name, "applied") for name in names
    ], trial.applied
    assert trial.details["errors"] == []


def test_what_was_counted_of_a_block_order_is_noted():
    trial = trial_of(("sorted", "2"), recipe_of("block_order"))

    assert [(item.technique, item.status) for item in trial.applied] == [("block_order", "applied")]
    (note,) = [note for note in trial.profile.notes if code_of(note) == TECHNIQUE_NOTE]
    assert note.startswith("what block_order found at its end: an epoch has 64 of 64 samples once")
    assert "샘플 64개 중 64개" in messages("ko").text(note)


def test_a_technique_that_refuses_says_its_own_reason():
    trial = trial_of(("tensors", "0"), recipe_of("dynamic_padding", "ram_cache"))

    whys = {item.technique: (item.status, item.why) for item in trial.applied}
    assert whys == {
        "dynamic_padding": (
            "not_applicable",
            "no attention_mask tells which tokens of a batch are padding",
        ),
        "ram_cache": ("not_applicable", "the samples lie in memory already"),
    }


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("plain", "0"), "ram_cache"),
        (("flipped", "2"), "ram_cache"),
        (("plain", "2"), "read_ahead"),
        (("tensors", "2"), "device_cache"),
        (("texts", "2"), "ram_cache"),
    ],
)
def test_the_guard_finds_the_same_training_bit_by_bit(arguments, name, tmp_path):
    paths = []
    for recipe in (Recipe(), recipe_of(name)):
        keep = tmp_path / str(len(paths))
        keep.mkdir()
        guard = GUARD | ({"reference": paths[0]} if paths else {})
        trial = trial_of(arguments, recipe, guard=guard, keep=keep)
        assert trial.outcome is Outcome.OK, trial.message + trial.traceback
        assert trial.details["errors"] == []
        assert [item.status for item in trial.applied] == ["applied"] * len(recipe.choices)
        paths.append(trial.guard_path)
    baseline, candidate = (read_record(Path(path)) for path in paths)

    check = judge(Trials(baseline=baseline, candidate=candidate, promise=Numerics.EXACT))

    assert check.passed, check.why
    assert not any(check.worst.values()), check.why
