import sys

import pytest

from flatout.cli import call, tuning_output
from flatout.records.ablation import ablation_from_json
from flatout.records.trial import Workload
from flatout.workflow import demo


def test_the_job_is_made_and_tuned_within_the_budget(folder, monkeypatch, capsys, stored):
    asked = []

    def job(out):
        (out / "job").mkdir()
        return Workload(target="train.py", folder=out.absolute() / "job", python=sys.executable)

    def answer(workload, options, _tell):
        asked.append((workload, options))
        return ablation_from_json(stored("ablation_tuned"))

    monkeypatch.setattr(demo, "make_job", job)
    monkeypatch.setattr(tuning_output, "tune", answer)

    assert call(["demo", "--out", "d", "--budget", "2m"]) == 0
    assert 60.0 < asked[0][1].budget_s < 120.0
    assert (folder / "d/ladder.html").exists()
    assert "next  cd d/job && flatout run --with ../recipe.toml train.py" in capsys.readouterr().out


@pytest.mark.chaos
def test_a_folder_that_cannot_be_written_is_told(folder, capsys):
    (folder / "file").touch()

    assert call(["demo", "--out", "file/out"]) == 2
    assert "name a folder that can be written" in capsys.readouterr().err
