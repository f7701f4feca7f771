import numpy as np
import pytest

import flatout.data
from flatout.core.errors import UserError
from flatout.data.sources import open_source
from flatout.data.verify import verify
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


def test_several_parquet_files_of_a_folder_are_one_set(tmp_path):
    (tmp_path / "p").mkdir()
    table = pa.table(rows())
    pq.write_table(table.slice(0, 4), tmp_path / "p/a.parquet")
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
    assert verify(source, tmp_path / "a", tell=lambda _progress: None).is_equal


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
