"""The first line of a report names the known cause of each script, and the findings agree."""

import json
import re
import shutil

import pytest

from flatout.records.ablation import ablation_from_json
from tests.support.ordinary import (
    COMPUTES,
    MOST_LINES,
    SCRIPTS,
    check_document,
    check_report,
    flatout,
)

pytestmark = pytest.mark.slow

WAITS = r"^\d\d % of each step waits for data"
KNOWN = {
    "photo_folder": (WAITS, {"data_wait"}),
    "slow_collate": (WAITS, {"data_wait"}),
    "bert_trainer": (COMPUTES, {"math_attention"}),
    "lightning_cnn": (COMPUTES, set()),
    "padded_reviews": (COMPUTES, {"padding_waste"}),
    "large_vocabulary": (COMPUTES, set()),
    "tiny_model": (r"^Adam \(not fused, 84 tensors\) takes", {"slow_optimizer"}),
    "big_embedding": (r"^Adam \(not fused, 2 tensors\) takes", {"slow_optimizer"}),
    "chatty_metrics": (r"pass outside loading, trained model and optimizer", {"other_python"}),
    "careless_evaluation": (
        r"^(AdamW \(not fused, 6 tensors\) takes|calls in evaluation mode build graphs)",
        {"evaluation_graph"},
    ),
}
"""By script: what the first line says, and what has to be found."""
TRIED = {"network_disk": "loader_workers", "big_embedding": "fused_optimizer"}
LINE = re.compile(r"\[(?:\d+ min )?\d+ s of 2 min 0 s(?:, (\d+) runs?)?\] ")


@pytest.mark.parametrize("name", KNOWN)
def test_measure_names_the_cause_in_its_first_line(name, tmp_path):
    check_report(tmp_path, name, *KNOWN[name])


@pytest.mark.parametrize("name", TRIED)
def test_tune_reports_within_its_lines_and_its_progress_counts_the_runs(name, tmp_path):
    shutil.copy(SCRIPTS / f"{name}.py", tmp_path)
    words = ("--budget", "2m", "--accept-load", "--only", TRIED[name])

    done = flatout(tmp_path, "tune", *words, f"{name}.py")

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= MOST_LINES
    found = [LINE.match(line) for line in done.stderr.splitlines()]
    assert all(found), done.stderr
    runs = [int(line[1] or 0) for line in found]
    assert runs == sorted(runs)
    assert runs[-1] > 1
    plain = json.loads((tmp_path / "flatout-out/ablation.json").read_text())
    check_document(plain)
    ablation = ablation_from_json(plain)
    assert {row.choice.technique for row in ablation.rows} <= {TRIED[name]}
    assert "failed" not in {row.verdict.value for row in ablation.rows}
    assert {path.name for path in tmp_path.iterdir()} == {"flatout-out", f"{name}.py"}


def test_plan_writes_what_its_schema_says(tmp_path):
    shutil.copy(SCRIPTS / "padded_reviews.py", tmp_path)

    done = flatout(tmp_path, "plan", "--gpu", "24GiB", "--json", "plan.json", "padded_reviews.py")

    assert done.returncode == 0, done.stderr
    check_document(json.loads((tmp_path / "plan.json").read_text()))
