import shutil

import numpy as np
import pytest

import flatout.data
from flatout.data.sources import open_source
from flatout.data.verify import verify
from flatout.data.writer import PackOptions
from flatout.records.errors import UserError
from flatout.workflow.pack import pack
from tests.data.packs import file_bytes, packed, skipped_in

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def rows(count=10):
    return {
        "image": [{"bytes": file_bytes(n), "path": f"{n}.jpg"} for n in range(count)],
        "label": [n % 3 for n in range(count)],
        "text": [f"row {n}" for n in range(count)],
        "ids": [[n, n + 1] for n in range(count)],
        "score": [n / 2 for n in range(count)],
    }


def check(folder, count=10):
    data = flatout.data.open(folder, order="source", decode="bytes")
    assert len(data) == count
    for number, found in enumerate(data):
        assert found == {
            "image": file_bytes(number),
            "label": number % 3,
            "text": f"row {number}",
            "ids": [number, number + 1],
            "score": number / 2,
        }


def test_parquet_is_packed_row_by_row(tmp_path):
    pq.write_table(pa.table(rows()), tmp_path / "a.parquet", row_group_size=3)

    packed(tmp_path / "a.parquet", tmp_path / "a")

    check(tmp_path / "a")
    assert not (tmp_path / "a/.pack").exists()


@pytest.mark.parametrize("first", ["a.parquet", "A.PARQUET"])
def test_several_parquet_files_of_a_folder_are_one_set(tmp_path, first):
    (tmp_path / "p").mkdir()
    table = pa.table(rows())
    pq.write_table(table.slice(0, 4), tmp_path / "p" / first)
    pq.write_table(table.slice(4), tmp_path / "p/b.parquet")

    packed(tmp_path / "p", tmp_path / "a")

    check(tmp_path / "a")


@pytest.mark.parametrize("writer", ["new_file", "new_stream"])
def test_arrow_files_and_streams_are_packed(tmp_path, writer):
    table = pa.table(rows())
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        getattr(pa.ipc, writer)(sink, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=4)

    packed(tmp_path / "a.arrow", tmp_path / "a", shard_bytes=2_000, workers=2)

    check(tmp_path / "a")


def test_what_hugging_face_saved_is_packed_with_its_class_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])}
    )
    plain = {name: rows()[name] for name in ("image", "label")}
    saved = datasets.Dataset.from_dict(plain, features=features)
    saved.save_to_disk(tmp_path / "saved")

    packed(tmp_path / "saved", tmp_path / "a")
    data = flatout.data.open(tmp_path / "a", order="source", decode="bytes")

    assert data.classes == ("cat", "dog", "owl")
    assert data[4] == {"image": file_bytes(4), "label": 1}
    source = open_source(str(tmp_path / "saved"), work=tmp_path / "work")
    assert not verify(source, tmp_path / "a", tell=lambda _progress: None).num_problems


def test_a_folder_of_splits_asks_for_one_of_them(tmp_path):
    for name in ("train", "test"):
        (tmp_path / "saved" / name).mkdir(parents=True)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    with pytest.raises(UserError, match="pack one of them: test, train"):
        packed(tmp_path / "saved", tmp_path / "a")


def test_an_empty_cell_is_a_bad_sample(tmp_path):
    pq.write_table(pa.table({"x": [1, None, 3]}), tmp_path / "a.parquet")

    with pytest.raises(UserError, match=r"row 1: x is empty \(null\)"):
        packed(tmp_path / "a.parquet", tmp_path / "a")

    packed(tmp_path / "a.parquet", tmp_path / "b", on_bad="skip")
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["row 1"]


def test_a_damaged_file_and_an_empty_one_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"a\.parquet cannot be read"):
        packed(tmp_path / "a.parquet", tmp_path / "a")

    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="nothing to pack"):
        packed(tmp_path / "b.parquet", tmp_path / "b")


def test_nested_lists_become_arrays(tmp_path):
    pq.write_table(pa.table({"x": [[[1.5, 2.0], [3.0, 4.0]]] * 3}), tmp_path / "a.parquet")
    packed(tmp_path / "a.parquet", tmp_path / "a")

    found = flatout.data.open(tmp_path / "a")[0]["x"]

    assert np.array_equal(found, [[1.5, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    "cells",
    [
        [[1, 2], [], [3]],
        [[], [1, 2], []],
        [[[1, 2], [3, 4]], [], [[]]],
        [[], [[1, 2], [3, 4]], [[]]],
        [[[1], [2, 3]], [[1, 2], [3, 4]], []],
    ],
)
def test_empty_lists_are_packed_as_the_lists_they_are(tmp_path, cells):
    pq.write_table(pa.table({"x": cells}), tmp_path / "a.parquet")

    packed(tmp_path / "a.parquet", tmp_path / "a")

    data = flatout.data.open(tmp_path / "a", order="source")
    assert [np.asarray(row["x"], dtype=object).tolist() for row in data] == cells


def changed(path, tmp_path):
    """Write other rows of the same shape into a Parquet file."""
    other = {**rows(), "text": [f"ROW {n}" for n in range(10)]}
    pq.write_table(pa.table(other), tmp_path / "other")
    shutil.move(tmp_path / "other", path)


def test_what_a_killed_pack_wrote_out_is_not_used_for_another_parquet(tmp_path):
    path, work = tmp_path / "a.parquet", tmp_path / "a/.pack"
    pq.write_table(pa.table(rows()), path)
    open_source(str(path), work=work)  # which is as far as the killed one came
    changed(path, tmp_path)

    pack(str(path), tmp_path / "a", PackOptions(), lambda _progress: None)

    data = flatout.data.open(tmp_path / "a", order="source", decode="bytes")
    assert [row["text"] for row in data] == [f"ROW {n}" for n in range(10)]


def test_what_was_written_out_is_used_again_for_the_same_parquet(tmp_path):
    path, work = tmp_path / "a.parquet", tmp_path / "work"
    pq.write_table(pa.table(rows()), path)
    open_source(str(path), work=work)
    before = {item.name: item.stat().st_mtime_ns for item in work.iterdir()}

    open_source(str(path), work=work)

    assert {item.name: item.stat().st_mtime_ns for item in work.iterdir()} == before
    assert len(before) == 1


def test_a_pack_is_verified_against_the_parquet_as_it_is_then(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(rows()), path)

    found = pack(
        str(path),
        tmp_path / "a",
        PackOptions(),
        lambda progress: progress.event and changed(path, tmp_path),
        verify=True,
    )

    assert found.verification.num_problems == 10
    assert "the source has changed since it was packed" in found.verification.problems[0]
    assert not (tmp_path / "a/.pack").exists()


@pytest.mark.parametrize("times", [1, 2])
def test_a_pack_of_parquet_equals_it(tmp_path, times):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(rows()), path)

    for _ in range(times):
        found = pack(str(path), tmp_path / "a", PackOptions(), lambda _: None, verify=True)

    assert not found.verification.num_problems
    assert found.verification.samples == 10
    assert found.was_packed is (times == 2)


def test_room_for_the_arrow_files_is_asked_for_before_they_are_written(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": list(range(10_000))}), path)
    free = shutil.disk_usage(tmp_path)._replace(free=2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)

    with pytest.raises(
        UserError, match=r"written out as Arrow first, which takes about \d+\.\d KiB"
    ):
        pack(str(path), tmp_path / "a", PackOptions(), lambda _progress: None)
    assert not (tmp_path / "a").exists()


def texts(*cells):
    """Return a column of texts that are not looked at, as another tool may have written them."""
    plain = pa.array(cells, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(plain), plain.buffers())


def test_a_text_that_is_not_unicode_is_a_bad_sample(tmp_path):
    pq.write_table(pa.table({"x": texts(b"one", b"\xff", b"three")}), tmp_path / "a.parquet")

    with pytest.raises(UserError, match=r"row 1: x has no value in Python.*--on-bad skip"):
        packed(tmp_path / "a.parquet", tmp_path / "a")

    packed(tmp_path / "a.parquet", tmp_path / "b", on_bad="skip")
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["row 1"]


def test_a_first_text_that_is_not_unicode_is_named(tmp_path):
    pq.write_table(pa.table({"x": texts(b"\xff", b"two")}), tmp_path / "a.parquet")

    with pytest.raises(UserError, match="row 0: x has no value in Python"):
        packed(tmp_path / "a.parquet", tmp_path / "a")


def test_a_picture_that_is_nowhere_is_a_bad_sample(tmp_path):
    cells = [
        {"bytes": file_bytes(0), "path": None},
        {"bytes": None, "path": None},
        {"bytes": None, "path": "a\0.jpg"},
    ]
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")

    packed(tmp_path / "a.parquet", tmp_path / "a", on_bad="skip")

    reasons = {row["name"]: row["reason"] for row in skipped_in(tmp_path / "a")}
    assert reasons["row 1"] == "image has neither bytes nor a path"
    assert "no file has such a name" in reasons["row 2"]


def test_whole_numbers_beyond_64_bits_are_bad_samples(tmp_path):
    cells = pa.array([[1], [2**64 - 1]], pa.list_(pa.uint64()))
    pq.write_table(pa.table({"x": cells}), tmp_path / "a.parquet")

    packed(tmp_path / "a.parquet", tmp_path / "a", on_bad="skip")

    assert [row["name"] for row in skipped_in(tmp_path / "a")] == ["row 1"]


def test_files_without_a_column_of_the_first_are_named(tmp_path):
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "p/a.parquet")
    pq.write_table(pa.table({"x": [3]}), tmp_path / "p/b.parquet")

    with pytest.raises(UserError, match="the column y comes 0 times in some rows"):
        packed(tmp_path / "p", tmp_path / "a")


def test_columns_of_one_name_are_named(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as out,
    ):
        out.write_table(table)

    with pytest.raises(UserError, match="the column x comes 2 times"):
        packed(tmp_path / "a.arrow", tmp_path / "a")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=len)
def test_what_hugging_face_wrote_beside_the_rows_may_be_damaged(tmp_path, name, text):
    (tmp_path / "saved").mkdir()
    pq.write_table(pa.table({"label": [1]}), tmp_path / "saved/a.parquet")
    (tmp_path / "saved" / name).write_text(text)

    with pytest.raises(UserError, match=r"damaged .*; save the data set again"):
        packed(tmp_path / "saved", tmp_path / "a")
