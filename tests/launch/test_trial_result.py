"""What a training process hands its parent."""

import json
import math

import pytest

from flatout.launch.trial_process import find_result
from flatout.records.errors import UserError
from flatout.records.json_records import to_plain
from flatout.records.profile import ModelFacts
from flatout.records.trial_result import (
    DeviceSeen,
    LoaderSeen,
    RankPlace,
    Segment,
    TrialResult,
)

WHOLE = TrialResult(
    why="killed",
    segments=(Segment(who=1, seconds=[0.1, 0.2], losses=[2.5]), Segment(is_sampled=False)),
    device=DeviceSeen(kind="cuda", name="a GPU", busy_share=0.5),
    ranks=RankPlace(rank=1, world_size=2),
    models=(ModelFacts(name="Net", parameters=2, parameter_bytes=8, dtypes=("float32",)),),
    loaders=(LoaderSeen("main#0", {"num_workers": 2}, starts_s=[0.5]),),
    status={"ram_cache": ("applied", "")},
)


def write_result(result, path):
    path.write_text(json.dumps(to_plain(result)))


def test_what_is_written_is_read_as_the_same_record(tmp_path):
    write_result(WHOLE, tmp_path / "result-1.json")

    assert find_result(tmp_path / "result-1.json") == WHOLE


def test_a_loss_that_is_not_finite_is_kept(tmp_path):
    write_result(TrialResult(segments=(Segment(losses=[math.nan]),)), tmp_path / "r.json")

    found = find_result(tmp_path / "r.json")

    assert math.isnan(found.segments[0].losses[0])


def test_a_file_that_was_cut_off_is_no_result(tmp_path):
    write_result(WHOLE, tmp_path / "r.json")
    (tmp_path / "r.json").write_text((tmp_path / "r.json").read_text()[:200])

    assert find_result(tmp_path / "r.json") is None


def test_a_field_of_another_type_is_named_and_not_taken_for_a_cut_off_file(tmp_path):
    (tmp_path / "r.json").write_text('{"segments": [{"batches": "two"}]}')

    with pytest.raises(UserError, match=r"segments\[0\].batches"):
        find_result(tmp_path / "r.json")
