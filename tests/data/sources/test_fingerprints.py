"""A source whose content changed is another source, however alike it looks."""

import os

import numpy as np
import pytest

from flatout.data.sources import open_source
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, packed, tar

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def npy(path, number):
    np.save(path, np.full((6, 2), number))


def npz(path, number):
    np.savez(path, x=np.full((6, 2), number))


def text(path, number):
    path.write_text(f"line {number}\n" * 6)


def json_lines(path, number):
    path.write_text(f'{{"n": {number}}}\n' * 6)


def parquet(path, number):
    pq.write_table(pa.table({"n": [number] * 6}), path)


def arrow(path, number):
    table = pa.table({"n": [number] * 6})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)


def tar_of_numbers(path, number):
    tar(path, [(f"{n}.cls", str(number).encode()) for n in range(6)])


def script(path, number):
    path.write_text(
        f"class Data:\n"
        f"    def __len__(self): return 6\n"
        f"    def __getitem__(self, index): return {number}\n"
    )


def picture(path, number):
    path.write_bytes(file_bytes(number, "bmp", size=(8, 8)))


SOURCES = {
    "a.npy": npy,
    "a.npz": npz,
    "a.txt": text,
    "a.jsonl": json_lines,
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.tar": tar_of_numbers,
    "made.py": script,
    "folder/cat/a.bmp": picture,
    "table/a.bmp": picture,
}


def written(root, name, number):
    """Write a source, later than it was written before; return what is to be packed."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before_ns = path.stat().st_mtime_ns if path.exists() else 0
    SOURCES[name](path, number)
    if before_ns:
        os.utime(path, ns=(before_ns, before_ns + 1))
    if name == "made.py":
        return f"{path}:Data"
    if name.startswith("table"):
        (root / "table/a.csv").write_text("path,y\na.bmp,1\n")
        return str(root / "table/a.csv")
    return str(root / "folder") if name.startswith("folder") else str(path)


@pytest.mark.parametrize("name", SOURCES)
def test_content_of_equal_shape_that_was_written_again_is_another_source(tmp_path, name):
    target = written(tmp_path, name, 3)
    before = open_source(target, work=tmp_path / "work").fingerprint()
    again = open_source(target, work=tmp_path / "work").fingerprint()
    size = (tmp_path / name).stat().st_size
    written(tmp_path, name, 7)

    after = open_source(target, work=tmp_path / "work").fingerprint()

    assert again == before
    assert after != before
    assert (tmp_path / name).stat().st_size == size


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.arrow"])
def test_a_source_that_was_written_again_is_read_again(tmp_path, name):
    target = written(tmp_path, name, 3)
    first = np.asarray(open_source(target, work=tmp_path / "work").read(0)).tolist()
    written(tmp_path, name, 7)

    second = np.asarray(open_source(target, work=tmp_path / "work").read(0)).tolist()

    assert np.unique(first) == 3
    assert np.unique(second) == 7


def test_a_finished_store_of_what_was_there_before_is_not_taken_for_the_new_one(tmp_path):
    target = written(tmp_path, "a.npy", 3)
    packed(target, tmp_path / "a")
    written(tmp_path, "a.npy", 7)

    with pytest.raises(UserError, match="from another source"):
        packed(target, tmp_path / "a")


def test_an_unfinished_pack_does_not_go_on_with_other_content(tmp_path):
    def stop(_progress):
        raise KeyboardInterrupt

    target = written(tmp_path, "a.npy", 3)
    with pytest.raises(KeyboardInterrupt):
        packed(target, tmp_path / "a", tell=stop)
    written(tmp_path, "a.npy", 7)

    with pytest.raises(UserError, match=r"another pack \(fingerprint differ\)"):
        packed(target, tmp_path / "a")


def test_arrays_that_are_written_to_while_they_are_packed_are_named(tmp_path):
    target = written(tmp_path, "a.npz", 3)
    source = open_source(target, work=tmp_path / "work")
    written(tmp_path, "a.npz", 7)
    open_source(target, work=tmp_path / "work")  # which takes the place of what was read before

    with pytest.raises(UserError, match="was written to while it was packed"):
        source.read(0)
