"""Records to JSON values and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from flatout.records.json_records import from_plain, to_plain
from tests.support.programs import python


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    title: str
    count: int = 1
    share: float | None = None
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Part] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, float] = (1, 2)
    colour: Colour = Colour.RED
    folder: Path = Path()
    flags: frozenset[str] = frozenset()
    last: Part | None = None
    is_done: bool = False
    facts: Any = None


FULL = Whole(
    title="x",
    count=3,
    share=0.5,
    parts=(Part(name="a"), Part(name="b")),
    by_name={"c": Part(name="c")},
    kind="b",
    pair=(4, 5.5),
    folder=Path("out"),
    flags=frozenset({"avx2", "amx"}),
    last=Part(name="d"),
    is_done=True,
    facts={"any": [1, "thing"]},
)


def test_a_record_with_every_kind_of_field_comes_back_from_json():
    assert from_plain(Whole, json.loads(json.dumps(to_plain(FULL)))) == FULL


def test_what_json_does_not_have_is_written_as_texts_and_lists():
    plain = to_plain(FULL)

    assert plain["parts"] == [{"name": "a"}, {"name": "b"}]
    assert plain["colour"] == "red"
    assert plain["folder"] == "out"
    assert plain["flags"] == ["amx", "avx2"]


def test_a_file_of_another_version_has_more_or_fewer_keys():
    assert from_plain(Whole, {"title": "x", "new": 1}) == Whole(title="x")


def test_a_value_may_be_a_record_already():
    part = Part(name="a")

    assert from_plain(Whole, {"title": "x", "last": part, "parts": [part]}).last is part


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": "1"}, "count='1' is no int"),
        ({"count": True}, "count='True' is no int"),
        ({"count": 1.0}, "count='1.0' is no int"),
        ({"count": None}, "count='None' is no int"),
        ({"share": "x"}, "share='x' is no float"),
        ({"share": False}, "share='False' is no float"),
        ({"parts": "ab"}, "parts='ab' is no tuple[tests.records.test_json_records.Part, ...]"),
        ({"parts": [1]}, "parts[0]='1' is no Part"),
        ({"parts": [{"name": "a"}, {"name": 7}]}, "parts[1].name='7' is no str"),
        ({"parts": [{}]}, "parts[0].name is missing"),
        ({"by_name": {"c": {"name": 7}}}, "by_name.c.name='7' is no str"),
        ({"by_name": []}, "by_name='[]' is no "),
        ({"kind": "c"}, "kind='c' is no Literal['a', 'b']"),
        ({"kind": []}, "kind='[]' is no Literal['a', 'b']"),
        ({"pair": [1, 2, 3]}, "pair='[1, 2, 3]' is no tuple[int, float]"),
        ({"colour": "green"}, "colour='green' is no Colour"),
        ({"colour": []}, "colour='[]' is no Colour"),
        ({"folder": 1}, "folder='1' is no Path"),
        ({"last": {"name": None}}, "last.name='None' is no str"),
        ({"is_done": 1}, "is_done='1' is no bool"),
        ({"title": "x" * 100, "count": "y" * 100}, f"count='{'y' * 60}' is no int"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_path(settings, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the whole message is compared
        from_plain(Whole, {"title": "x"} | settings)

    assert str(refused.value).startswith(message)


def test_a_needed_value_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"^title is missing$"):
        from_plain(Whole, {})


def test_what_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match=r"^it='\[\]' is no Whole$"):
        from_plain(Whole, [])


def test_records_are_read_with_the_standard_library_alone():
    code = (
        "import sys; import flatout.records.trial, flatout.records.trial_spec; "
        "known = set(sys.stdlib_module_names) | {'flatout'}; "
        "print({name.split('.')[0] for name in sys.modules} - known - set(sys.argv[1:]))"
    )
    before = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    start = python(["-c", before])
    done = python(["-c", code, *start.stdout.split()])

    assert done.stdout.strip() == "set()", done.stderr
