import numpy as np
import pytest
import torch

import flatout.data
from flatout.data.format import Encoding
from flatout.records.errors import UserError
from tests.data.packs import packed, photograph, skipped_in

SCRIPT = """
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from tests.data.packs import Items, photograph

class Odd:
    pass

def make(): return Items([(photograph(n), n % 3) for n in range(6)])
tensors = Items([{"x": torch.full((2,), float(n)), "y": np.int64(n), "s": "a"} for n in range(6)])
lists = Items([[torch.tensor(n), [1, 2], None is n] for n in range(4)])
ragged = Items([torch.zeros(n + 1) for n in range(4)])
objects = Items([(1, Odd())])
changing = Items([(1, 2), (1, 2, 3)])
failing = Items([1, 2])
failing.__class__ = type("Failing", (Items,), {"__getitem__": lambda s, i: 1 if i == 0 else 1 / 0})
empty = Items([])
class Unsized(Items):
    def __len__(self): raise AttributeError("no items yet")
unsized = Unsized([1])
large = Items([{"a": [1]}, {"a": [2**64]}])
def nested(levels):
    inner = []
    for _ in range(levels): inner = [inner]
    return inner
deep = Items([{"a": [1, "x"]}, {"a": nested(100_000)}])
class Stream(IterableDataset):
    def __iter__(self): return iter(())
    def __getitem__(self, i): raise TypeError
stream = Stream()
number = 3
later = Items([{"a": []}, {"a": [[1, float("nan")]]}, {"a": [(1, 2)]}, {"a": [{1: 2}]}])
numbered = Items([{0: 5, 1: 6}])
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "made.py").write_text(SCRIPT)
    return tmp_path / "made.py"


def stored(script, name, **options):
    packed(f"{script}:{name}", script.parent / name, **options)
    return flatout.data.open(script.parent / name, order="source")


@pytest.mark.parametrize("kind", ["original", "raw", "zstd"])
def test_pillow_images_come_back_as_such(script, kind):
    data = stored(script, "make", encoding=Encoding(kind=kind))

    assert len(data) == 6
    assert data[4][0].tobytes() == photograph(4).tobytes()
    assert data[4][1] == 1
    assert data.targets == [0, 1, 2, 0, 1, 2]


def test_tensors_arrays_and_texts_come_back_as_what_they_were(script):
    found = stored(script, "tensors")[3]

    assert torch.equal(found["x"], torch.full((2,), 3.0))
    assert type(found["y"]) is np.ndarray
    assert found["y"] == 3
    assert found["s"] == "a"


def test_what_would_come_back_as_something_else_is_a_bad_sample(script):
    data = stored(script, "later", on_bad="skip")

    assert repr([sample["a"] for sample in data]) == "[[], [[1, nan]]]"
    skipped = skipped_in(script.parent / "later")
    assert [(one["name"], one["reason"][:37]) for one in skipped] == [
        (f"item {n}", "field 'a' holds what would come back ") for n in (2, 3)
    ]


def test_lists_stay_lists(script):
    found = stored(script, "lists")[1]

    assert found == [torch.tensor(1), [1, 2], False]


def test_samples_of_different_sizes_are_packed(script):
    data = stored(script, "ragged")

    assert [len(item) for item in data] == [1, 2, 3, 4]
    assert data.header.fields[0].shape is None


def test_workers_import_the_data_set_for_themselves(script):
    assert len(stored(script, "tensors", workers=2, method="spawn", shard_bytes=150)) == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("objects", r"field '1' is .*Odd; packed are bytes, text, numbers.*nothing is pickled"),
        ("changing", "item 1: it is a tuple of 0, 1, 2, and the first item is a tuple of 0, 1"),
        ("failing", "item 1: the data set raised ZeroDivisionError"),
        ("empty", "nothing to pack"),
        ("stream", "has no length"),
        ("unsized", "its length raised AttributeError: no items yet"),
        ("large", "item 1: field 'a' is list here and array in the samples before"),
        ("deep", "item 1: field 'a' is list here and json in the samples before"),
        ("numbered", "item 0: its key 0 is no text"),
        ("number", "is a int|raised TypeError"),
        ("tensor", "did you mean 'tensors'"),
    ],
)
def test_data_sets_that_cannot_be_packed_are_named_with_the_reason(script, name, words):
    with pytest.raises(UserError, match=words):
        packed(f"{script}:{name}", script.parent / "a", is_shuffled=False)


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")

    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        packed(f"{tmp_path / 'broken.py'}:data", tmp_path / "a")
    with pytest.raises(UserError, match="cannot be imported"):
        packed("no_such_module:data", tmp_path / "b")
