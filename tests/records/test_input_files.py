"""The one reader of JSON and TOML, on what damaged and hostile files hold."""

import os
from dataclasses import dataclass
from typing import Literal

import pytest

from flatout.records.input_files import check_record, parse_json, read_json, read_toml

DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEEP + "]" * DEEP,
        "[" * 65 + "]" * 65,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        "9" * 5_000,
        "1" + "0" * 400,
        "-18446744073709551616",
        "1e999",
        "1." + "0" * 500,
        '"\x00"',
        "[1,]",
        "",
    ],
)
def test_json_beyond_the_bounds_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  whatever it says
        parse_json(text)


def test_json_that_flatout_writes_is_read():
    assert parse_json(b'{"a": [1, -2.5e-3, NaN, null, true, "\\ud800"]}')["a"][:2] == [1, -0.0025]
    assert parse_json("18446744073709551615") == 2**64 - 1


@pytest.mark.parametrize(
    "text",
    [
        "a = 2026-11-23",
        "a = 12:30:00",
        "a = " + "[" * 25_000,
        "a = " + "9" * 5_000,
        "a = 1" + "0" * 400,
        "[" + ".".join("a" * 200) + "]",
        "a = 1\na = 2",
        "# " + "x" * (1 << 16),
    ],
)
def test_toml_beyond_the_bounds_is_a_value_error(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)

    with pytest.raises(ValueError):  # noqa: PT011  whatever it says
        read_toml(tmp_path / "a.toml")


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match="no regular file"):
            read_json(path)


def test_a_file_that_is_too_large_is_refused_without_being_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(ValueError, match="larger than"):
        read_json(tmp_path / "large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    count: int = 1
    share: float | None = None
    parts: tuple[Part, ...] = ()
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (1, 2)


def test_a_record_of_the_declared_types_passes():
    check_record(Whole(share=1, parts=(Part(name="a"),)))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"count": "1"}, "count"),
        ({"count": True}, "count"),
        ({"share": "x"}, "share"),
        ({"parts": [1]}, "parts"),
        ({"parts": (Part(name=7),)}, r"parts\.name"),
        ({"kind": "c"}, "kind"),
        ({"pair": (1, 2, 3)}, "pair"),
    ],
)
def test_a_record_of_another_type_names_the_field(settings, where):
    with pytest.raises(ValueError, match=f"^{where}="):
        check_record(Whole(**settings))
