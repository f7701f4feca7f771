import json

import pytest

import flatout.data
from flatout.core.errors import UserError
from flatout.data.format import Encoding
from tests.data.packs import packed, skipped_in

BYTES = Encoding(kind="tokens", tokenizer="bytes")


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


def test_what_an_encoding_needs_is_said(tmp_path):
    path = written(tmp_path / "a.txt", "one")

    with pytest.raises(UserError, match="needs a field of images; there are: text"):
        packed(path, tmp_path / "a", encoding=Encoding(kind="raw"))
    with pytest.raises(UserError, match="needs --tokenizer"):
        packed(path, tmp_path / "b", encoding=Encoding(kind="tokens"))
    wanted = Encoding(kind="tokens", tokenizer=str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match=r"nothing\.json is not a tokenizer"):
        packed(path, tmp_path / "c", encoding=wanted)
