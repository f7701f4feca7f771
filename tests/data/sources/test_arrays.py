import zipfile

import numpy as np
import pytest

import flatout.data
from flatout.data.sources import arrays
from flatout.records.errors import UserError
from tests.data.packs import packed


def test_rows_of_an_array_are_samples(tmp_path):
    array = np.random.default_rng(0).normal(size=(7, 2, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)

    packed(tmp_path / "a.npy", tmp_path / "a")

    found = np.stack(list(flatout.data.open(tmp_path / "a", order="source")))
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i4", "float16", "complex64"])
def test_every_kind_of_number_comes_back(tmp_path, dtype):
    array = np.arange(6).reshape(3, 2).astype(dtype)
    np.save(tmp_path / "a.npy", array)

    packed(tmp_path / "a.npy", tmp_path / "a")

    assert np.array_equal(np.stack(list(flatout.data.open(tmp_path / "a", order="source"))), array)


def test_several_arrays_are_fields_and_one_is_the_label(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(8).reshape(4, 2), y=np.array([3, 1, 2, 0], np.int32))

    packed(tmp_path / "a.npz", tmp_path / "a")

    data = flatout.data.open(tmp_path / "a", order="source")
    assert data.targets == [3, 1, 2, 0]
    assert data[1]["y"] == 1
    assert data[1]["x"].tolist() == [2, 3]


def test_python_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)

    with pytest.raises(UserError, match="never unpickled"):
        packed(tmp_path / "a.npy", tmp_path / "a")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"different numbers of rows \(x 3, y 4\)"),
        ({"x": np.zeros((0, 3))}, "nothing to pack"),
        ({"x": np.array(["a", "b"])}, "x holds no numbers"),
    ],
)
def test_arrays_that_make_no_samples_are_named(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)

    with pytest.raises(UserError, match=words):
        packed(tmp_path / "a.npz", tmp_path / "a")


def cut_off(path):
    np.savez(path, x=np.arange(9))
    path.write_bytes(path.read_bytes()[:-30])


def damaged(path):
    """Write an .npz of which a byte of the compressed numbers is another one."""
    np.savez_compressed(path, x=np.random.default_rng(0).random(1_000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def with_a_text(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "no array")


def plain_array(path):
    with path.open("wb") as file:
        np.save(file, np.arange(9))


def whole_archive(path):
    with path.open("wb") as file:
        np.savez(file, x=np.arange(9))


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("a.npz", cut_off, "cannot be read as plain arrays"),
        ("a.npz", damaged, "cannot be read as plain arrays"),
        ("a.npz", with_a_text, r"notes\.txt holds no numbers"),
        ("a.npz", plain_array, "cannot be read as plain arrays"),
        ("a.npy", whole_archive, "value holds no numbers"),
        ("a.npy", lambda path: path.write_bytes(b""), "cannot be read as plain arrays"),
    ],
)
def test_files_that_are_no_arrays_are_named(tmp_path, name, write, words):
    write(tmp_path / name)

    with pytest.raises(UserError, match=words):
        packed(tmp_path / name, tmp_path / "a")


def test_a_name_in_capitals_is_a_name(tmp_path):
    plain_array(tmp_path / "A.NPY")

    packed(tmp_path / "A.NPY", tmp_path / "a")

    assert list(flatout.data.open(tmp_path / "a", order="source")) == list(range(9))


def test_an_archive_that_would_unpack_to_more_than_the_free_memory_is_refused(
    tmp_path, monkeypatch
):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 1000)))
    monkeypatch.setattr(arrays, "free_memory_bytes", lambda: 1 << 20)

    with pytest.raises(UserError, match="it unpacks to 8000128 bytes; 1048576 are allowed"):
        packed(tmp_path / "a.npz", tmp_path / "a")
