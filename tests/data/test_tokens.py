"""Texts that are packed as the tokens of a tokenizer's file."""

import os

import pytest

import flatout.data
from flatout.data.format import Encoding
from flatout.data.sources import open_source
from flatout.records.errors import UserError
from tests.data.packs import packed, skipped_in

tokenizers = pytest.importorskip("tokenizers")
WORDS = ("[UNK]", "a", "cat", "sat", "on", "mat")
TEXTS = "a cat sat on mat\na dog\n"


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS)
    return tmp_path / "a.txt"


def made(words=WORDS):
    """Return a tokenizer that gives each word its number."""
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def saved(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    return Encoding(kind="tokens", tokenizer=str(folder / "tokenizer.json"))


def tokens_in(folder):
    return [row.tolist() for row in flatout.data.open(folder, order="source")]


def stop(_progress):
    raise KeyboardInterrupt


def test_texts_are_stored_whole_whatever_the_file_says_about_inputs_of_a_model(tmp_path, texts):
    tokenizer = made()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)

    packed(texts, tmp_path / "a", encoding=saved(tmp_path, tokenizer))

    assert tokens_in(tmp_path / "a") == [[1, 2, 3, 4, 5], [1, 0]]


def test_a_finished_store_of_another_tokenizer_is_refused(tmp_path, texts):
    packed(texts, tmp_path / "a", encoding=saved(tmp_path, made()))
    encoding = saved(tmp_path, made(WORDS[::-1]))

    with pytest.raises(UserError, match="from another source or with other options"):
        packed(texts, tmp_path / "a", encoding=encoding)


def test_an_unfinished_store_does_not_go_on_with_another_tokenizer(tmp_path, texts):
    with pytest.raises(KeyboardInterrupt):
        packed(texts, tmp_path / "a", encoding=saved(tmp_path, made()), tell=stop)
    encoding = saved(tmp_path, made(WORDS[::-1]))

    with pytest.raises(UserError, match=r"another pack \(fingerprint differ\)"):
        packed(texts, tmp_path / "a", encoding=encoding)


def test_a_tokenizer_that_was_only_copied_is_the_same(tmp_path, texts):
    encoding = saved(tmp_path, made())
    with pytest.raises(KeyboardInterrupt):
        packed(texts, tmp_path / "a", encoding=encoding, tell=stop)
    os.utime(encoding.tokenizer, ns=(0, 0))

    assert packed(texts, tmp_path / "a", encoding=encoding).samples == 2
    os.utime(encoding.tokenizer, ns=(1, 1))
    assert packed(texts, tmp_path / "a", encoding=encoding).samples == 2


def test_a_tokenizer_that_was_written_again_is_read_again(tmp_path, texts):
    packed(texts, tmp_path / "a", encoding=saved(tmp_path, made()))

    packed(texts, tmp_path / "b", encoding=saved(tmp_path, made(WORDS[::-1])))

    assert tokens_in(tmp_path / "a")[0] == [1, 2, 3, 4, 5]
    assert tokens_in(tmp_path / "b")[0] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("encoding", [Encoding(), Encoding(kind="tokens", tokenizer="bytes")])
def test_without_such_a_file_the_source_alone_tells_stores_apart(tmp_path, texts, encoding):
    header = packed(texts, tmp_path / "a", encoding=encoding)

    source = open_source(str(texts), work=tmp_path / "work")
    assert header.source["fingerprint"] == source.fingerprint()


def test_a_text_that_the_tokenizer_refuses_is_a_bad_sample(tmp_path, texts):
    encoding = saved(tmp_path, made(WORDS[1:]))  # which has no word for one that it does not know

    with pytest.raises(UserError, match=r"line 2: the tokenizer cannot encode .*--on-bad skip"):
        packed(texts, tmp_path / "a", encoding=encoding)

    packed(texts, tmp_path / "b", encoding=encoding, on_bad="skip")
    assert [row["name"] for row in skipped_in(tmp_path / "b")] == ["line 2"]
    assert tokens_in(tmp_path / "b") == [[0, 1, 2, 3, 4]]
