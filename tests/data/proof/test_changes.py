import multiprocessing
import pickle
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flatout.data.proof.changes import ChangeWatch, find_change, state_of
from tests.data.changing import CHANGES, Counting, Sized, Times


@dataclass(slots=True)
class Resize:
    size: int
    mode: str = "bilinear"


class Crop(Resize):
    """It inherits its slots, and is given attributes of its own as well."""


OTHERS = {
    "list": ([[1, 2], [3, 4]], lambda x: x.__setitem__(0, [1, 9])),
    "long list": (list(range(10**5)), lambda x: x.reverse()),
    "dict": ({"a": {"b": 1}}, lambda x: x["a"].update(b=2)),
    "deque": (deque([1, 2]), lambda x: x.append(3)),
    "set": ({1, 2}, lambda x: x.add(3)),
    "array": (np.zeros((1000, 2)), lambda x: x.__setitem__((slice(None), 1), 5)),
    "objects": (np.array([None, "a"]), lambda x: x.__setitem__(0, "b")),
    "tensor": (torch.zeros(1000, 3), lambda x: x[7].add_(1)),
    "bfloat16": (torch.zeros(9, dtype=torch.bfloat16), lambda x: x.add_(1)),
    "shared array": (torch.zeros(9), lambda x: x.numpy().fill(1)),
    "bytes": (bytearray(1000), lambda x: x.__setitem__(slice(None), b"x" * 1000)),
    "shared number": (multiprocessing.Value("i", 3), lambda x: setattr(x, "value", 4)),
    "arguments": (SimpleNamespace(size=3), lambda x: setattr(x, "size", 4)),
    "transforms": (
        SimpleNamespace(transforms=[SimpleNamespace(size=(3, 3))]),
        lambda x: setattr(x.transforms[0], "size", (4, 4)),
    ),
    "slots": (Resize(3), lambda x: setattr(x, "size", 4)),
    "inherited slots": (Crop(3), lambda x: setattr(x, "size", 4)),
    "partial": (partial(max, Times(1.0)), lambda x: setattr(x.args[0], "factor", 2.0)),
    "arguments of a partial": (partial(max, key=1), lambda x: x.keywords.update(key=2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_scripts_do_to_a_data_set_is_seen(kind):
    make, change = CHANGES[kind]
    dataset = make()
    before = state_of(dataset)

    assert find_change(before, state_of(dataset)) is None
    change(dataset)

    assert find_change(before, state_of(dataset))


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_changed_in_place_is_seen(kind):
    value, change = OTHERS[kind]
    dataset = SimpleNamespace(held=value)
    before = state_of(dataset)

    assert find_change(before, state_of(dataset)) is None
    change(value)

    assert find_change(before, state_of(dataset)) == "held"


def test_a_path_that_is_asked_for_its_text_is_not_changed():
    dataset = SimpleNamespace(root=Path("a") / "b")
    before = state_of(dataset)
    str(dataset.root)
    hash(dataset.root)

    assert find_change(before, state_of(dataset)) is None


def test_a_slot_that_is_set_later_is_seen():
    dataset = SimpleNamespace(held=Resize.__new__(Resize))
    before = state_of(dataset)
    dataset.held.size = 3

    assert find_change(before, state_of(dataset)) == "held"


def test_columns_of_a_table_are_seen():
    pandas = pytest.importorskip("pandas")
    dataset = SimpleNamespace(table=pandas.DataFrame({"a": range(100), "b": range(100)}))
    before = state_of(dataset)

    assert find_change(before, state_of(dataset)) is None
    dataset.table.loc[:, "b"] = 7

    assert find_change(before, state_of(dataset)) == "table"


def test_another_object_in_the_same_place_of_memory_is_seen():
    dataset = Sized()
    for _ in range(100):  # the allocator is free to give another place
        before = state_of(dataset)
        place = id(dataset.transform)
        dataset.transform = None
        dataset.transform = Times(1.0)
        if id(dataset.transform) == place:
            break

    assert id(dataset.transform) == place
    assert find_change(before, state_of(dataset)) is not None


def test_a_list_is_a_data_set_too():
    dataset = [1, 2]
    before = state_of(dataset)
    dataset.append(3)

    assert find_change(before, state_of(dataset)) == "its items"


def test_a_data_set_that_leads_to_itself_is_looked_at_once():
    dataset = SimpleNamespace(names=["a"])
    dataset.myself = dataset
    dataset.many = [SimpleNamespace(back=dataset) for _ in range(10**4)]

    assert find_change(state_of(dataset), state_of(dataset)) is None


def test_attributes_that_come_and_go_are_seen():
    dataset = SimpleNamespace(size=1)
    before = state_of(dataset)
    dataset.limit = 2
    after = state_of(dataset)

    assert find_change(before, after) == find_change(after, before) == "limit"


def test_what_reading_changes_is_no_change():
    dataset = Counting()
    watch = ChangeWatch(dataset)

    with watch.reading():
        dataset[3]
        assert not watch.is_changed()

    assert not watch.is_changed()
    dataset.size = 9
    assert watch.is_changed()
    assert "(size)" in watch.trouble


def test_readers_in_many_threads_are_not_taken_for_the_script():
    dataset = Counting()
    watch = ChangeWatch(dataset)

    def read(index):
        changed = watch.is_changed()
        with watch.reading():
            dataset[index]
        return changed

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(read, [index % 24 for index in range(2000)]))
    assert not watch.is_changed()


def test_what_changed_once_stays_changed():
    dataset = Sized()
    watch = ChangeWatch(dataset)
    dataset.size = 9
    watch.is_changed()
    dataset.size = 2

    with watch.reading():
        dataset[3]

    assert watch.is_changed()


def test_a_spawned_process_learns_of_a_change_that_came_before_it():
    watch = ChangeWatch(Sized())
    same = pickle.loads(pickle.dumps(watch))
    watch.dataset.size = 9

    changed = pickle.loads(pickle.dumps(watch))

    assert not same.is_changed()
    assert changed.is_changed()
