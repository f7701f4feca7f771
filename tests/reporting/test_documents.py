import contextlib
import json
import math
import os
import resource
from dataclasses import replace

import pytest

from flatout.records.ablation import Comparison, ablation_from_json
from flatout.records.errors import UserError
from flatout.reporting.documents import ensure_writable, read_json, write_json, write_text


def test_what_is_written_is_read_back(tmp_path):
    write_json({"schema": "x/1", "rows": [1, "two"]}, tmp_path / "new/folder/a.json")

    assert read_json(tmp_path / "new/folder/a.json") == {"schema": "x/1", "rows": [1, "two"]}


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_json({"losses": (1.0, math.nan), "interval": [0.0, math.inf]}, tmp_path / "a.json")

    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {
        "losses": [1.0, None],
        "interval": [0.0, None],
    }


def test_an_infinite_interval_survives_the_file(tuned, tmp_path):
    pair = Comparison(ratio=1.5, interval=(0.0, math.inf), n=1, resolution=math.inf)
    ablation = replace(tuned, confirmation=pair, resolution=math.inf)
    write_json(ablation.to_json(), tmp_path / "a.json")

    assert ablation_from_json(read_json(tmp_path / "a.json")) == ablation


@contextlib.contextmanager
def files_no_larger_than(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    with files_no_larger_than(10), pytest.raises(UserError, match="name a folder that can be"):
        write_text("new and much too long", path)

    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]


def test_a_report_has_the_permissions_of_any_other_file(tmp_path):
    other = tmp_path / "other"
    other.touch()

    write_text("x", tmp_path / "a.txt")

    assert (tmp_path / "a.txt").stat().st_mode == other.stat().st_mode


@pytest.mark.chaos
def test_an_unwritable_folder_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UserError, match=r"cannot write to .*name a folder that can be written"):
        ensure_writable(tmp_path / "file/out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told_before_the_work(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(UserError, match="Permission denied"):
        ensure_writable(tmp_path)


def test_trying_a_folder_leaves_nothing_in_it(tmp_path):
    ensure_writable(tmp_path / "made/out")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[1]", "holds no flatout document"), ("\udcff", "is not JSON")],
)
def test_what_is_no_document_is_refused(tmp_path, text, words):
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(UserError, match=words):
        read_json(tmp_path / "a.json")


def test_a_missing_document_says_who_writes_one(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*flatout measure --json"):
        read_json(tmp_path / "a.json")


def test_a_folder_is_no_document(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_json(tmp_path)
