import json
import sys

import pytest

from flatout.cli import call, tuning_output
from flatout.records.ablation import ablation_from_json
from flatout.records.technique import Numerics
from flatout.records.trial import Workload
from flatout.workflow import demo


@pytest.fixture
def asked(folder, monkeypatch, stored):
    """Return what was tuned; the answers are stored ones."""
    asked = []

    def job(out):
        (out / "job").mkdir()
        return Workload(target="train.py", folder=out.absolute() / "job", python=sys.executable)

    def answer(workload, options, _tell):
        asked.append((workload, options))
        return ablation_from_json(stored("ablation_tuned"))

    monkeypatch.setattr(demo, "make_job", job)
    monkeypatch.setattr(tuning_output, "tune", answer)
    return asked


def test_the_job_is_made_and_tuned_within_the_budget(asked, folder, capsys):
    assert call(["demo", "--out", "d", "--budget", "2m"]) == 0
    assert 60.0 < asked[0][1].budget_s < 120.0
    assert (folder / "d/ladder.html").exists()
    assert "next  cd d/job && flatout run --with ../recipe.toml train.py" in capsys.readouterr().out


def test_the_second_part_adds_what_changes_the_training_to_the_recipe(asked, folder, capsys):
    assert call(["demo", "--out", "d", "--budget", "2m", "--training"]) == 0

    (_, first), (_, second) = asked
    found = ablation_from_json(json.loads((folder / "d/ablation.json").read_text()))
    tried = {row.choice.technique for row in found.rows}
    assert {*second.skip} == tried - {*found.recipe.names} != set()
    assert (first.numerics, second.numerics) == (Numerics.PRECISION, Numerics.TRAINING)
    assert second.pack.endswith("photographs")
    assert (folder / "d/training/ladder.html").exists()
    assert "files d/training/: ladder.html" in capsys.readouterr().out


@pytest.mark.slow
def test_the_lesson_on_tiling_runs(capfd):
    assert call(["demo", "tiling"]) == 0
    said = capfd.readouterr().out
    assert all(f"\n{lesson} " in said for lesson in ("product", "convolution", "attention"))


@pytest.mark.chaos
def test_a_folder_that_cannot_be_written_is_told(folder, capsys):
    (folder / "file").touch()

    assert call(["demo", "--out", "file/out"]) == 2
    assert "name a folder that can be written" in capsys.readouterr().err
