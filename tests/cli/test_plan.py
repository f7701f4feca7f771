import json
import pickle

import pytest

from flatout.cli import call
from flatout.planner.workspaces import FOLDER
from tests.paths import ROOT

SUBJECT = f"{ROOT / 'tests/scripts/whole/planned.py'}:subject"


def test_a_plan_is_printed_and_written(folder, capsys):
    options = ["--json", "a.json", "--html", "a.html", "--snapshot", "a.pickle"]

    code = call(["plan", "--gpu", "l4", *options, SUBJECT])

    out = capsys.readouterr().out
    plain = json.loads((folder / "a.json").read_text())
    snapshot = pickle.loads((folder / "a.pickle").read_bytes())
    assert code == 0
    assert out.startswith("It fits on NVIDIA L4 (22.03 GiB) with ")
    assert plain["schema"] == "flatout.plan/1"
    assert plain["fits"] is True
    assert (folder / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert snapshot["device_traces"][0]


@pytest.mark.slow
def test_what_does_not_fit_ends_with_code_1(folder, capsys):
    code = call(["plan", "--gpu", "600MiB", "--batch", "64", SUBJECT])

    assert code == 1
    assert capsys.readouterr().out.startswith("It does not fit on ")


def test_an_unknown_gpu_ends_with_code_2(folder, capsys):
    code = call(["plan", "--gpu", "rtx4091", SUBJECT])

    assert code == 2
    assert "did you mean 'rtx4090'" in capsys.readouterr().err


def test_help_names_the_gpus_that_memory_was_compared_with(capsys):
    measured = {path.name.partition("-")[0] for path in FOLDER.glob("*-torch-*.json")}

    assert call(["plan", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert measured == {"h200"}
    assert "compared with an H200, and with no other GPU" in told
