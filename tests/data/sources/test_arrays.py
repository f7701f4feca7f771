import numpy as np
import pytest

import flatout.data
from flatout.core.errors import UserError
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
