"""The demo: its job is made from what is installed, kept, and tuned."""

import importlib.util
import sys

import pytest

from flatout.records.errors import UserError
from flatout.workflow import demo
from flatout.workflow.demo import make_job, scenarios
from flatout.workflow.tune import TuneOptions, tune
from tests.support.programs import ran


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(demo, "IMAGES", 27)


def test_the_scenarios_are_found_in_a_clone():
    assert (scenarios() / "photographs.py").is_file()
    assert (scenarios() / demo.JOB / "train.py").is_file()


def test_the_job_is_a_script_that_trains_where_it_lies(tmp_path, few_images):
    job = make_job(tmp_path / "demo")

    command = [sys.executable, job.target, *job.arguments[:2], "--steps", "2", "--image-size", "32"]
    done = ran(command, cwd=job.folder)

    assert done.returncode == 0, done.stderr
    assert "25 training images" in done.stdout


def test_photographs_are_made_once(tmp_path, few_images):
    job = make_job(tmp_path)
    first = {path: path.stat().st_mtime_ns for path in job.folder.rglob("*.jpg")}

    make_job(tmp_path)

    assert len(first) == 27
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob("*.jpg")} == first


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "skimage" else find(name)
    )

    with pytest.raises(UserError, match=r"needs scikit-image: pip install 'flatout\[demo\]'"):
        make_job(tmp_path)


def test_an_out_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")

    with pytest.raises(UserError, match="choose another --out"):
        make_job(tmp_path / "out")


def test_photographs_that_cannot_be_made_say_why(tmp_path, few_images):
    (tmp_path / demo.JOB).mkdir()
    (tmp_path / demo.JOB / "photographs").write_text("in the way")

    with pytest.raises(UserError, match=r"could not be made: .*photographs"):
        make_job(tmp_path)


@pytest.mark.slow
def test_the_job_s_tuning_gives_its_evidence(tmp_path):
    options = TuneOptions(out=tmp_path, budget_s=40.0, accepts_load=True)

    ablation = tune(make_job(tmp_path), options, lambda _: None)

    assert ablation.baseline.phases_ms["data_wait"] > 0
    assert ablation.workload == "train.py --data photographs --epochs 100"
    assert (tmp_path / "journal.jsonl").is_file()
