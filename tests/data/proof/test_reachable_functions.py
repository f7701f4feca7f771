"""What a data set's samples are made with, found without running any of the script's code."""

import functools
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from flatout.data.proof.dataset_facts import find_catcher
from flatout.data.proof.reachable_functions import MAX_THINGS, reached
from tests.data import forgiving


class Plain:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class ByName(Plain):
    def __getitem__(self, index):
        return forgiving_read(index)


class ByModule(Plain):
    def __getitem__(self, index):
        return forgiving.read(index)


class ByClass(Plain):
    def __getitem__(self, index):
        return ForgivingReader(index).value()


class ByObject(Plain):
    def __init__(self):
        self.reader = ForgivingReader(3)

    def __getitem__(self, index):
        return self.reader.value()


class Nested(Plain):
    def __getitem__(self, index):
        def inner():
            try:
                return index + 1
            except Exception:  # noqa: BLE001
                return 0

        return inner()


class Slotted(Plain):
    __slots__ = ("own_step",)

    def __init__(self, step):
        self.own_step = step


class OnClass(Plain):
    step = staticmethod(forgiving.read)

    def __getitem__(self, index):
        return self.step(index)


class AsProperty(Plain):
    @property
    def value(self):
        try:
            return 1
        except Exception:  # noqa: BLE001
            return 0

    def __getitem__(self, index):
        return self.value


class Held(Plain):
    def __init__(self, held):
        self.prepare = held

    def __getitem__(self, index):
        return self.prepare(index)


def forgiving_read(index):
    return deeper(index)


def deeper(index):
    try:
        return 1 / index
    except Exception:  # noqa: BLE001
        return 0


class ForgivingReader:
    def __init__(self, index):
        self.index = index

    def value(self):
        try:
            return 1 / self.index
        except Exception:  # noqa: BLE001
            return 0


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def in_closure():
    step = deeper

    def call(value):
        return step(value)

    return call


class Base(Plain):
    def __getitem__(self, index):
        try:
            return 1 / index
        except Exception:  # noqa: BLE001
            return 0


class Listed(list):
    """A list whose items are made when they are asked for."""

    def __iter__(self):
        raise RuntimeError("nobody goes through it")

    def __getitem__(self, index):
        return deeper(index)


class Derived(Base):
    def __getitem__(self, index):
        return super().__getitem__(index + 1)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (ByName(), "deeper"),
        (ByModule(), "read"),
        (ByClass(), "ForgivingReader.value"),
        (ByObject(), "ForgivingReader.value"),
        (Nested(), "Nested.__getitem__"),
        (Slotted(deeper), "deeper"),
        (OnClass(), "OnClass.step"),
        (AsProperty(), "AsProperty.value"),
        (Held(deeper), "deeper"),
        (Held(decorated(deeper)), "deeper"),
        (Held(in_closure()), "deeper"),
        (Held(functools.partial(deeper)), "deeper"),
        (Held(functools.lru_cache(deeper)), "deeper"),
        (Held(ForgivingReader(1).value), "ForgivingReader.value"),
        (Held({"train": [deeper]}), "deeper"),
        (Listed([1]), "deeper"),
        (Subset(Plain(), Listed([deeper])), "deeper"),
        (Held(OrderedDict(one=deeper)), "deeper"),
        (Derived(), "Derived.__getitem__"),
        (Subset(Held(deeper), [0]), "deeper"),
    ],
)
def test_catchers_are_found_wherever_they_lie(dataset, name):
    assert find_catcher(dataset).endswith(name)


class Raising(Plain):
    """Nothing of it may be asked for."""

    @property
    def transform(self):
        raise RuntimeError("not now")

    @property
    def __dict__(self):
        raise ValueError("never")

    def __getattr__(self, name):
        raise KeyError(name)


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("stands for nothing yet")


@pytest.mark.parametrize(
    "make",
    [
        Raising,
        lambda: Held(Proxy()),
        lambda: Held(Raising()),
        lambda: Held(None),
        lambda: Held(len),
        lambda: 3,
    ],
)
def test_what_raises_when_it_is_asked_is_not_asked(make):
    assert find_catcher(make()) == ""


class Everyday(Plain):
    """Uses libraries, of which many catch errors."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.weights = torch.nn.Linear(2, 2)
        self.paths = [str(x) for x in range(100_000)]
        self.pairs = [(str(x), x) for x in range(10_000)]
        self.itself = self

    def __getitem__(self, index):
        return torch.as_tensor(np.asarray([index, time.time()]))


def test_libraries_are_not_entered():
    assert find_catcher(Everyday()) == ""


def test_no_more_is_looked_at_than_is_allowed():
    held = [[Held([Held(None) for _ in range(50)]) for _ in range(50)] for _ in range(50)]

    assert len(list(reached(Held(held)))) == MAX_THINGS


def test_no_code_of_the_script_runs():
    touched = []

    class Touchy(Plain):
        def __getattribute__(self, name):
            touched.append(name)
            return super().__getattribute__(name)

    assert find_catcher(Touchy()) == ""
    assert touched == []


class Annotated(Plain):
    """Boxes of many pictures, and behind them a transform that goes on after any error."""

    def __init__(self):
        boxes = [[[n, n, n, n] for n in range(10)] for _ in range(100)]
        self.records = [{"boxes": one, "labels": list(range(10))} for one in boxes]
        self.transform = Steps([ForgivingStep()])


class Steps:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for step in self.transforms:
            image = step(image)
        return image


class ForgivingStep:
    def __call__(self, image):
        try:
            return image.rotated()
        except Exception:  # noqa: BLE001  that is what is looked for
            return image


def test_a_transform_is_found_behind_the_boxes_of_many_pictures():
    assert "ForgivingStep" in find_catcher(Annotated())


def test_of_a_large_table_a_few_values_are_touched():
    dataset = Plain()
    dataset.index = {number: object() for number in range(100_000)}
    last = dataset.index[99_999]

    found = [value for _, value in reached(dataset)]

    assert not any(value is last for value in found)
