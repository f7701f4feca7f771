import json

import pytest

import flatout.data
from flatout.data import writer
from flatout.data.format import BadSample, Encoding
from flatout.data.sources import open_source
from flatout.records.errors import UserError
from tests.data.packs import packed, skipped_in

BYTES = Encoding(kind="tokens", tokenizer="bytes")
DEEP = 100_000
"""Levels of JSON that no parser of Python's goes down."""
BAD = {
    "numbers": '{"a": [18446744073709551615], "x": 0.5}',
    "number": '{"a": [1], "x": 1' + 400 * "0" + "}",
    "depth": '{"a": ' + DEEP * "[" + DEEP * "]" + "}",
}


def written(path, *lines, end="\n"):
    path.write_bytes((end.join(lines) + end).encode())
    return path


def test_mappings_come_back_with_their_types(tmp_path):
    rows = [
        {"text": f"a {n}", "n": n, "ids": [n, 1], "x": n + 0.5, "ok": n > 1, "more": {"a": [n]}}
        for n in range(5)
    ]

    packed(written(tmp_path / "a.jsonl", *map(json.dumps, rows)), tmp_path / "a")

    found = list(flatout.data.open(tmp_path / "a", order="source"))
    assert found == rows
    assert type(found[0]["ok"]) is bool


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_lines_of_text_are_samples_blank_ones_are_not(tmp_path, end):
    path = written(tmp_path / "a.txt", "one", "zw\u00f6lf", "  ", "three", end=end)

    packed(path, tmp_path / "a")

    assert list(flatout.data.open(tmp_path / "a", order="source")) == ["one", "zw\u00f6lf", "three"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_mark_of_utf_8_is_no_text(tmp_path, name):
    (tmp_path / name).write_text('{"a":1}\n{"a":2}\n', encoding="utf-8-sig")

    packed(tmp_path / name, tmp_path / "a")

    expected = [{"a": 1}, {"a": 2}] if name == "a.jsonl" else ['{"a":1}', '{"a":2}']
    assert list(flatout.data.open(tmp_path / "a", order="source")) == expected


def test_the_last_line_needs_no_end(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")

    assert packed(tmp_path / "a.txt", tmp_path / "a").samples == 2


def test_texts_become_tokens(tmp_path):
    packed(written(tmp_path / "a.txt", "abc", "z"), tmp_path / "a", encoding=BYTES)

    data = flatout.data.open(tmp_path / "a", order="source")

    assert data[0].tolist() == [97, 98, 99]
    assert data[0].dtype == "uint16"
    assert not data.header.is_lossless


def test_a_tokenizer_of_hugging_face_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "hello": 70_000, "world": 2}, "[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    encoding = Encoding(kind="tokens", tokenizer=str(tmp_path / "tokenizer.json"))

    packed(written(tmp_path / "a.txt", "hello world !"), tmp_path / "a", encoding=encoding)

    assert flatout.data.open(tmp_path / "a")[0].tolist()[1:] == [2, 0]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "first line: not JSON"),
        (["[1]"], "not a JSON mapping"),
        (['{"a": null}'], "NoneType"),
        (['{"a": 1}', '{"b": 1}'], r"line 2: it has other keys than the first line \(a, b\)"),
        (['{"a": 1}', '{"a": "x"}'], "line 2: field 'a' is str here and int in the samples"),
        (['{"a": 1}', '{"a": 1e400}', "{}"], "line [23]: "),
        (['{"a": 123456789012345678901234567890}'], "line 1: field 'a' is int"),
        (['{"a": [18446744073709551615]}'], "first line: field 'a' is a list of numbers beyond"),
        ([BAD["depth"]], "first line: not JSON"),
    ],
)
def test_lines_that_cannot_be_packed_are_named(tmp_path, lines, words):
    path = written(tmp_path / "a.jsonl", *lines)

    with pytest.raises(UserError, match=words):
        packed(path, tmp_path / "a")


def test_bad_lines_are_left_out_when_asked(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"a": 1}', "nonsense", '{"a": 3}')

    packed(path, tmp_path / "a", on_bad="skip")

    assert [row["name"] for row in skipped_in(tmp_path / "a")] == ["line 2"]


@pytest.mark.parametrize("kind", BAD)
def test_numbers_and_depths_beyond_all_bounds_are_bad_samples(tmp_path, kind):
    path = written(tmp_path / "a.jsonl", '{"a": [1], "x": 0.5}', BAD[kind])

    with pytest.raises(UserError, match=r"line 2: .*--on-bad skip"):
        packed(path, tmp_path / "a")

    packed(path, tmp_path / "b", on_bad="skip")
    assert list(flatout.data.open(tmp_path / "b")) == [{"a": [1], "x": 0.5}]
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["line 2"]


def test_a_text_that_is_too_large_for_a_record_is_a_bad_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_FIELD_BYTES", 16)
    path = written(tmp_path / "a.txt", "short", "this one is no longer short", "not six")

    packed(path, tmp_path / "a", on_bad="skip")
    packed(path, tmp_path / "b", on_bad="skip", encoding=BYTES, is_shuffled=False)

    assert [row["name"] for row in skipped_in(tmp_path / "a")] == ["line 2"]
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["line 2", "line 3"]


def test_what_an_encoding_needs_is_said(tmp_path):
    path = written(tmp_path / "a.txt", "one")

    with pytest.raises(UserError, match="needs a field of images; there are: text"):
        packed(path, tmp_path / "a", encoding=Encoding(kind="raw"))
    with pytest.raises(UserError, match="needs --tokenizer"):
        packed(path, tmp_path / "b", encoding=Encoding(kind="tokens"))
    wanted = Encoding(kind="tokens", tokenizer=str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match=r"nothing\.json is not a tokenizer"):
        packed(path, tmp_path / "c", encoding=wanted)


@pytest.mark.parametrize("left", ["one\ntw", "one\n", "one\ntwo\nthre"])
def test_a_file_that_is_cut_off_meanwhile_gives_no_shortened_texts(tmp_path, left):
    path = written(tmp_path / "a.txt", "one", "two", "three")
    source = open_source(str(path), work=tmp_path / "work")
    path.write_text(left)

    assert source.read(0) == ("one",)
    with pytest.raises(BadSample, match=r"a\.txt is shorter than it was"):
        source.read(2)


def test_a_log_that_is_begun_anew_while_it_is_packed_stops_the_pack(tmp_path):
    path = written(tmp_path / "a.txt", "one", "two", "three")

    with pytest.raises(UserError, match="is shorter than it was"):
        packed(path, tmp_path / "a", tell=lambda _progress: path.write_text("new\n"))


def test_lists_without_numbers_have_the_type_of_the_others(tmp_path):
    rows = [{"ids": [1, 2], "x": [0.5]}, {"ids": [], "x": [1.5]}, {"ids": [3], "x": []}]

    packed(written(tmp_path / "a.jsonl", *map(json.dumps, rows)), tmp_path / "a")

    data = flatout.data.open(tmp_path / "a", order="source")
    assert list(data) == rows
    assert [field.dtype for field in data.header.fields] == ["<i8", "<f8"]


def test_a_first_list_without_numbers_is_packed_too(tmp_path):
    rows = [{"ids": []}, {"ids": [1, 2]}, {"ids": []}]

    packed(written(tmp_path / "a.jsonl", *map(json.dumps, rows)), tmp_path / "a")

    assert list(flatout.data.open(tmp_path / "a", order="source")) == rows
