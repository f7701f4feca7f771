import shutil

import numpy as np
import pytest

from flatout.data.format import Encoding
from flatout.data.sources import open_source
from flatout.data.verify import check, verify
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, image_folder, packed

ENCODINGS = [
    Encoding(),
    Encoding(kind="raw"),
    Encoding(kind="qoi"),
    Encoding(kind="zstd"),
    Encoding(kind="raw", short_side=16),
    Encoding(kind="jpeg", quality=80),
]


def verified(source, folder, **options):
    opened = open_source(str(source), work=folder / ".pack")
    return verify(opened, folder, tell=lambda _progress: None, **options)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: f"{e.kind}-{e.short_side}")
@pytest.mark.parametrize("suffix", ["jpeg", "png"])
def test_every_encoding_equals_its_source(tmp_path, encoding, suffix):
    for module in ("qoi", "zstandard"):
        pytest.importorskip(module)
    source = image_folder(tmp_path / "photos", suffix=suffix)
    packed(source, tmp_path / "a", encoding=encoding)

    found = verified(source, tmp_path / "a")

    assert not found.num_problems
    assert found.samples == 12


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "1", "CMYK", "I;16"])
@pytest.mark.parametrize("kind", ["raw", "qoi", "zstd"])
def test_images_of_every_mode_stay_what_they_are(tmp_path, mode, kind):
    pytest.importorskip("qoi")
    suffix = "tiff" if mode == "CMYK" else "png"
    source = image_folder(tmp_path / "photos", 6, suffix=suffix, mode=mode)
    packed(source, tmp_path / "a", encoding=Encoding(kind=kind))

    assert not verified(source, tmp_path / "a").num_problems


def test_workers_verify_too(tmp_path):
    source = image_folder(tmp_path / "photos", 20)
    packed(source, tmp_path / "a", shard_bytes=4_000)

    assert not verified(source, tmp_path / "a", workers=2).num_problems


def test_one_flipped_bit_is_found_and_named(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")
    shard = tmp_path / "a/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    found = verified(source, tmp_path / "a")

    assert found.num_problems == 1
    assert "the stored bytes are damaged" in found.problems[0]


def test_a_file_that_changed_since_is_found_and_named(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")
    (source / "dog/0004.jpeg").write_bytes(file_bytes(77))
    (source / "dog/0005.jpeg").unlink()
    (source / "dog/0005.jpeg").mkdir()
    shutil.copy(source / "dog/0006.jpeg", source / "dog/0005a.jpeg")

    found = verified(source, tmp_path / "a")

    assert any("dog/0004.jpeg: the source has changed" in line for line in found.problems)


def test_a_source_of_another_length_is_refused(tmp_path):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "a")
    (source / "owl/more.jpeg").write_bytes(file_bytes(50))

    with pytest.raises(UserError, match="packed from 12 samples, and the source has 13"):
        verified(source, tmp_path / "a")


def checked(folder, **options):
    """Return the problems that a store has by itself."""
    return check(folder, tell=lambda _progress: None, **options)[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_needs_no_source_to_prove_its_own_bytes(tmp_path, workers):
    source = image_folder(tmp_path / "photos", 20)
    packed(source, tmp_path / "a", shard_bytes=4_000)
    shutil.rmtree(source)

    assert checked(tmp_path / "a", workers=workers) == []


@pytest.mark.parametrize("at", [0, 0.5, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_flipped_bit_anywhere_is_found_without_the_source(tmp_path, at, workers):
    packed(image_folder(tmp_path / "photos", 20), tmp_path / "a", shard_bytes=4_000)
    shard = tmp_path / "a/shard-00001.bin"
    data = bytearray(shard.read_bytes())
    data[round(at * (len(data) - 1))] ^= 1
    shard.write_bytes(data)

    problems = checked(tmp_path / "a", workers=workers)

    assert len(problems) == 1
    assert problems[0].endswith(".jpeg: the stored bytes are damaged")


def change_index(folder, column, value):
    """Write another value into the first row of the index."""
    index = np.load(folder / "index.npy")
    index[column][0] = value
    np.save(folder / "index.npy", index)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("label", 77, "the index has the label 77 for it"),
        ("length", 3, "the stored bytes are damaged"),
        ("original", 99, "such that the source does not have"),
    ],
)
def test_an_index_that_does_not_belong_to_the_records_is_found(tmp_path, column, value, words):
    packed(image_folder(tmp_path / "photos"), tmp_path / "a")
    change_index(tmp_path / "a", column, value)

    assert any(words in problem for problem in checked(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("names.txt", b"no JSON\n", "names.txt is damaged"),
        ("names.txt", b'"one name"\n', "names.txt is damaged"),
        ("skipped.jsonl", b"{}\n", "0 samples are missing and 1 are listed"),
    ],
)
def test_lists_that_contradict_the_header_are_found(tmp_path, name, data, words):
    packed(image_folder(tmp_path / "photos"), tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(data)

    assert any(words in problem for problem in checked(tmp_path / "a"))


def test_a_store_that_was_packed_without_some_samples_is_sound(tmp_path):
    source = image_folder(tmp_path / "photos")
    (source / "dog/0004.jpeg").write_bytes(b"no image")
    packed(source, tmp_path / "a", on_bad="skip")

    assert checked(tmp_path / "a") == []


def test_a_file_shard_that_is_cut_off_is_named(tmp_path):
    packed(image_folder(tmp_path / "photos"), tmp_path / "a")
    shard = tmp_path / "a/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(UserError, match=r"shard-00000\.bin has \d+ bytes instead of"):
        checked(tmp_path / "a")
