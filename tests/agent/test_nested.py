from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flatout.agent.nested import map_leaves

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True, slots=True)
class Output:
    loss: float
    parts: list


def double(leaf):
    return leaf * 2 if isinstance(leaf, int) else leaf


def test_every_kind_of_structure_keeps_its_type():
    default = defaultdict(list, a=1)

    assert map_leaves([1, (2, "x")], double) == [2, (4, "x")]
    assert map_leaves(Pair(1, [2]), double) == Pair(2, [4])
    assert map_leaves(OrderedDict(a=1), double) == OrderedDict(a=2)
    assert map_leaves(MappingProxyType({"a": 1}), double) == MappingProxyType({"a": 2})
    assert map_leaves(default, double).default_factory is list
    assert map_leaves(Output(loss=1, parts=[2]), double) == Output(loss=2, parts=[4])


def test_the_given_structure_is_not_changed():
    given = {"a": [1, 2]}

    map_leaves(given, double)

    assert given == {"a": [1, 2]}


def test_a_structure_without_changes_is_the_same_object():
    for given in (["x"], Pair("x", "y"), {"a": ("x",)}, Output(loss=0.5, parts=["x"])):
        assert map_leaves(given, double) is given


def test_what_torch_returns_keeps_its_type():
    found = torch.max(torch.ones(2, 2), dim=0)

    changed = map_leaves(found, lambda leaf: leaf.double())

    assert type(changed) is type(found)
    assert changed.values.dtype == torch.float64


def test_a_packed_sequence_is_a_leaf():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    seen = []

    map_leaves([packed], lambda leaf: seen.append(leaf) or leaf)

    assert seen == [packed]
