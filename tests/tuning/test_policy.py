"""Journals lead the policy through the experiments that they record, and nothing is run."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.records.ablation import LossCheck
from flatout.records.json_records import from_plain
from flatout.tuning.experiments import record_from_json
from flatout.tuning.policy import Policy, TuningTask
from tests.tuning.test_busy_machine import Shared
from tests.tuning.test_screening import COMPUTE, ScreenedWorld
from tests.workflow.test_tune import World, run

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


@pytest.mark.parametrize("name", WORLDS)
def test_a_recorded_journal_leads_to_the_same_experiments_and_the_same_recipe(name):
    *lines, end = golden(name).splitlines()
    task, records = read("\n".join(lines))
    policy = Policy(task)

    asked = [policy.next(records[:count]) for count in range(len(records) + 1)]

    assert [each.key for each in asked[:-1]] == [record.key for record in records]
    assert asked[-1] is None
    assert policy.result.state.recipe.label == json.loads(end)["recipe"]


def test_all_records_at_once_lead_to_the_same_end():
    task, records = read("\n".join(golden("screen").splitlines()[:-1]))

    policy = Policy(task)

    assert policy.next(records) is None
    assert policy.result.proof.confirmation.n >= 3


def test_the_journal_of_any_tuning_holds_all_that_it_decided_from(tmp_path):
    ablation = tuned("screen", tmp_path)

    task, records = read((tmp_path / "journal.jsonl").read_text())
    policy = Policy(task)
    last = policy.next(records)

    assert last is None
    assert tuple(policy.result.state.rows) == ablation.rows
    assert policy.result.proof.confirmation == ablation.confirmation
    assert {record.key.split()[0] for record in records} >= {"time", "look", "screen", "check"}


def test_with_less_time_left_the_same_trials_lead_to_an_earlier_end():
    task, records = read("\n".join(golden("pairs").splitlines()[:-1]))
    late = [replace(record, elapsed_s=1e6) for record in records]

    with pytest.raises(ValueError, match="asked for was nothing"):
        Policy(task).next(late)


def test_a_record_of_another_experiment_is_refused():
    task, records = read("\n".join(golden("pairs").splitlines()[:-1]))

    with pytest.raises(ValueError, match=r"record 0 is .*; asked for was time \[\]"):
        Policy(task).next([records[1], *records[2:]][1:])


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
