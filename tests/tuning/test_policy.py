"""Journals lead the policy through the experiments that they record, and nothing is run."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.records.ablation import Comparison, LossCheck, Row, Verdict
from flatout.records.json_records import from_plain
from flatout.records.recipe import Choice, Recipe
from flatout.tuning.experiments import TrialHistory, record_from_json
from flatout.tuning.policy import TuningTask, _drop_one, budget_of, tuning
from tests.tuning.test_busy_machine import Shared
from tests.tuning.test_screening import COMPUTE, ScreenedWorld
from tests.workflow.test_tune import MACHINE, World, run

JOURNALS = Path(__file__).parent / "journals"
"""Recorded by `python -m tests.tuning.test_policy`, which is run again where a change of the policy
is meant: the difference of the keys is what to review."""
WORLDS = {
    "pairs": lambda: World({"bf16_autocast": 0.6, "loader_workers": 0.6}),
    "screen": lambda: ScreenedWorld(
        {"bf16_autocast": 0.5, "fused_optimizer": 0.85, "torch_compile": 0.8}
    ),
    "guilty": lambda: ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8}),
    "busy": lambda: Shared({"bf16_autocast": 0.5}, busy={2: 0.48, 3: 0.48}),
}
ONLY = {"pairs": ("bf16_autocast", "loader_workers"), "busy": ("bf16_autocast",)}


def check(_, recipe):
    is_wrong = recipe.names[:1] == ("bf16_autocast",) and len(recipe.names) == 2
    return LossCheck(status="rejected" if is_wrong else "within", why="gradients differ")


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)


def tuned(name, folder):
    return run(WORLDS[name](), folder, only=ONLY.get(name, COMPUTE))


def read(text):
    """Return what a journal begins with, and the records of the policy's experiments."""
    header, *rows = map(json.loads, text.splitlines())
    task = from_plain(TuningTask, header["header"]["task"])
    rows = [row for row in rows if not row["key"].startswith("guard ")]
    return task, [record_from_json(row) for row in rows]


def golden(name):
    return gzip.decompress((JOURNALS / f"{name}.jsonl.gz").read_bytes()).decode()


def replayed(task, records):
    """Return the keys of what was asked for, and the end of the tuning, None if there is more."""
    asking, asked = tuning(task, budget_of(task), lambda _: None), []
    try:
        experiment = next(asking)
        for record in records:
            asked.append(experiment.key)
            experiment = asking.send(record)
    except StopIteration as end:
        return asked, end.value
    return asked, None


@pytest.mark.parametrize("name", WORLDS)
def test_a_recorded_journal_leads_to_the_same_experiments_and_the_same_recipe(name):
    *lines, end = golden(name).splitlines()
    task, records = read("\n".join(lines))

    asked, found = replayed(task, records)

    assert asked == [record.key for record in records]
    assert found.state.recipe.label == json.loads(end)["recipe"]


def test_the_journal_of_any_tuning_holds_all_that_it_decided_from(tmp_path):
    ablation = tuned("screen", tmp_path)

    task, records = read((tmp_path / "journal.jsonl").read_text())
    _, found = replayed(task, records)

    assert tuple(found.state.rows) == ablation.rows
    assert found.proof.confirmation == ablation.confirmation
    assert {record.key.split()[0] for record in records} >= {"time", "look", "screen", "check"}


def test_with_less_time_left_the_same_trials_lead_to_an_earlier_end():
    task, records = read("\n".join(golden("pairs").splitlines()[:-1]))
    late = [replace(record, elapsed_s=1e6) for record in records]

    asked, found = replayed(task, late)

    assert asked == [record.key for record in records][: len(asked)]
    assert len(asked) < len(records)
    assert found is not None


def test_the_last_of_a_screen_is_left_out_once_where_its_own_gain_is_not_sure():
    def screened(technique, interval):
        pair = Comparison(ratio=1.2, interval=interval, n=9, source="screen")
        choice = Choice(technique=technique)
        return Row(choice=choice, numerics="rounding", verdict=Verdict.KEPT, comparison=pair)

    rows = [screened("bf16_autocast", (1.1, 1.3)), screened("fused_optimizer", (0.98, 1.5))]
    state = SimpleNamespace(
        rows=rows,
        recipe=Recipe(choices=tuple(row.choice for row in rows)),
        floor=Recipe(),
        passengers=frozenset(),
        has_time=lambda: True,
        say=lambda _: None,
        history=TrialHistory(machine=MACHINE),
    )

    asked = next(_drop_one(state))

    assert asked.recipe.names == ("bf16_autocast",)


if __name__ == "__main__":
    import tempfile
    from unittest.mock import patch

    for world in WORLDS:
        with (
            tempfile.TemporaryDirectory() as folder,
            patch("flatout.workflow.tune.GuardChecker.check", check),
        ):
            found = tuned(world, Path(folder))
            text = (Path(folder) / "journal.jsonl").read_text()
            text += json.dumps({"recipe": found.recipe.label}) + "\n"
        JOURNALS.mkdir(exist_ok=True)
        packed = gzip.compress(text.encode(), mtime=0)
        (JOURNALS / f"{world}.jsonl.gz").write_bytes(packed)
