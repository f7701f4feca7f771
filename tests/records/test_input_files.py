"""The one reader of JSON and TOML, on what damaged and hostile files hold."""

import os

import pytest

from flatout.records.input_files import parse_json, read_json, read_toml

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


def test_the_mark_that_editors_on_windows_put_first_is_no_content(tmp_path):
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")
    (tmp_path / "marked.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')

    assert read_toml(tmp_path / "marked.toml") == {"a": 1}
    assert read_json(tmp_path / "marked.json") == {"a": 1}


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
