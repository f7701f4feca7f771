import json
import shutil

import numpy as np
import pytest

from flatout.cli import call
from tests.data.packs import image_folder


@pytest.fixture
def photos(tmp_path):
    return str(image_folder(tmp_path / "photos"))


def test_it_tells_what_was_packed_and_how_to_use_it(photos, tmp_path, capsys):
    code = call(["pack", photos, str(tmp_path / "a"), "--verify", "--json", f"{tmp_path}/a.json"])

    out = capsys.readouterr().out
    assert code == 0
    assert "12 samples in 1 file shard" in " ".join(out.split())
    assert "lossless" in out
    assert "classes   3: cat, dog, owl" in out
    assert "bit by bit" in " ".join(out.split())
    assert "flatout.data.open(" in out
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["schema"] == "flatout.pack/1"
    assert result["verification"]["num_problems"] == 0


def test_the_second_time_there_is_nothing_to_do(photos, tmp_path, capsys):
    call(["pack", photos, str(tmp_path / "a")])

    assert call(["pack", photos, str(tmp_path / "a")]) == 0
    assert "it was packed before" in " ".join(capsys.readouterr().out.split())


def test_lossy_stores_are_called_lossy(photos, tmp_path, capsys):
    call(["pack", photos, str(tmp_path / "a"), "--encode", "jpeg", "--short-side", "16"])

    assert "LOSSY" in capsys.readouterr().out


def test_skipped_samples_are_counted_and_named(photos, tmp_path, capsys):
    (tmp_path / "photos/cat/0001.jpeg").write_bytes(b"not an image")

    assert call(["pack", photos, str(tmp_path / "a")]) == 2
    assert "cat/0001.jpeg" in capsys.readouterr().err
    assert call(["pack", photos, str(tmp_path / "b"), "--on-bad", "skip"]) == 0
    out = capsys.readouterr().out
    assert "skipped   1 sample" in out
    assert "cat/0001.jpeg: not an image" in out


def test_a_store_that_differs_ends_with_code_1_and_names_the_sample(photos, tmp_path, capsys):
    call(["pack", photos, str(tmp_path / "a")])
    shard = tmp_path / "a/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)

    assert call(["pack", photos, str(tmp_path / "a"), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "1 sample NOT as in the source" in " ".join(out.split())
    assert "the stored bytes are damaged" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--short-side", "9"], "--short-side needs --encode"),
        (["--encode", "gif"], "gif"),
        (["--workers", "0"], "workers"),
    ],
)
def test_options_that_make_no_sense_are_named(photos, tmp_path, capsys, arguments, words):
    assert call(["pack", photos, str(tmp_path / "a"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_store_inside_its_source_is_refused(photos, capsys):
    assert call(["pack", photos, f"{photos}/packed"]) == 2
    assert "choose a folder outside it" in capsys.readouterr().err


def test_a_failed_start_leaves_nothing_behind(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.zeros((0, 2)))

    assert call(["pack", str(tmp_path / "a.npy"), str(tmp_path / "out")]) == 2
    assert call(["pack", str(tmp_path / "missing"), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert "there is no" in capsys.readouterr().err


def test_the_size_and_the_room_for_it_are_told_before_anything_is_written(photos, tmp_path, capsys):
    assert call(["pack", photos, str(tmp_path / "a")]) == 0

    first = capsys.readouterr().err.splitlines()[0]
    assert "about 12.2 KiB to write" in first
    assert "free in" in first


def test_a_store_is_checked_without_its_source(photos, tmp_path, capsys):
    call(["pack", photos, str(tmp_path / "a")])
    shutil.rmtree(photos)
    capsys.readouterr()

    code = call(["pack", "--check", str(tmp_path / "a"), "--json", f"{tmp_path}/check.json"])

    assert code == 0
    assert "12 samples, 11.1 KiB; all as they were written" in words_of(capsys.readouterr().out)
    result = json.loads((tmp_path / "check.json").read_text())
    assert result["schema"] == "flatout.pack_check/1"
    assert result["is_sound"] is True
    assert result["problems"] == []


def test_a_damaged_store_ends_its_check_with_code_1_and_the_sample(photos, tmp_path, capsys):
    call(["pack", photos, str(tmp_path / "a")])
    shard = tmp_path / "a/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)

    code = call(["pack", "--check", str(tmp_path / "a"), "--json", f"{tmp_path}/check.json"])

    out = words_of(capsys.readouterr().out)
    assert code == 1
    assert "1 problem found" in out
    assert ".jpeg: the stored bytes are damaged" in out
    assert json.loads((tmp_path / "check.json").read_text())["num_problems"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "SRC and DST are needed"),
        (["photos"], "SRC and DST are needed"),
        (["photos", "--check", "store"], "leave photos away"),
        (["--check", "nowhere"], "there is no packed store"),
    ],
)
def test_what_is_missing_or_too_much_is_named(capsys, arguments, words):
    assert call(["pack", *arguments]) == 2
    assert words in words_of(capsys.readouterr().err)


def words_of(text):
    return " ".join(text.split())


def test_files_are_copied_in_shuffled_order_and_what_was_counted_is_shown(photos, tmp_path, capsys):
    where = ["pack", "--files", photos, str(tmp_path / "a")]

    code = call([*where, "--json", f"{tmp_path}/a.json"])

    out = " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "a.json").read_text())
    assert code == 0
    assert "12 files" in out
    assert "a permutation of all of them, seed 0" in out
    assert "flatout tune --numerics training train.py" in out
    assert result["schema"] == "flatout.pack_files/1"
    assert (result["files"], result["seed"]) == (12, 0)
    assert sorted(path.name for path in (tmp_path / "a").rglob("*.jpeg")) == [
        f"{number:04d}.jpeg" for number in range(12)
    ]
    assert call(where) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--encode", "raw"], ["--keep-order"], ["--verify"], ["--tokenizer", "bytes"]]
)
def test_what_does_not_go_with_files_is_refused(photos, tmp_path, capsys, more):
    assert call(["pack", "--files", photos, str(tmp_path / "a"), *more]) == 2
    assert "--seed alone goes with it" in capsys.readouterr().err
