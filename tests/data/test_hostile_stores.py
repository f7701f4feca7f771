"""Stores and sources that somebody else made: what is wrong in them is refused, and harmless."""

import io
import json
import os
import shutil
import struct
import tarfile

import numpy as np
import pytest

import flatout.data
from flatout.data import pictures
from flatout.data.format import SCHEMA, BadSample, Encoding, read_header
from flatout.data.packed_store import PackedStore
from flatout.data.sources import open_source
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, image_folder, packed, tar


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    packed(image_folder(root / "photos", 4), root / "store")
    return root / "store"


@pytest.fixture
def store(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


def rewrite(store, schema="flatout.packed/1", **changes):
    """Write a header with other facts in the first format, which has no checksum."""
    path = store / "header.json"
    plain = json.loads(path.read_text()) | {"schema": schema} | changes
    path.write_text(json.dumps(plain))


@pytest.mark.parametrize("name", ["/etc/hostname", "../shard-00000.bin", "header.json"])
def test_a_shard_outside_the_store_is_not_read(store, name):
    rewrite(store, shards=[{"name": name, "samples": 4, "bytes": 10}])

    with pytest.raises(UserError, match="is no name of a file shard"):
        PackedStore(store)


def test_a_store_of_the_first_format_is_still_read(store):
    rewrite(store)

    assert len(flatout.data.open(store)) == 4


def test_every_flipped_bit_of_a_header_is_refused(store):
    path = store / "header.json"
    data = path.read_bytes()

    for place in range(0, 8 * len(data), 97):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        if flipped.split() != data.split():  # a blank between two words may be any blank
            with pytest.raises(UserError):
                read_header(store)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": "4"},
        {"samples": -4},
        {"samples": 10**400},
        {"fields": []},
        {"fields": {"a": 1}},
        {"fields": [{"name": 7, "kind": "int"}]},
        {"encoding": {"kind": None}},
        {"encoding": []},
        {"shards": [{"name": "shard-00000.bin", "samples": 4}]},
        {"classes": 5},
        {"source": []},
    ],
)
def test_a_header_of_other_types_is_a_user_error(store, changes):
    rewrite(store, **changes)

    with pytest.raises(UserError, match="is damaged"):
        read_header(store)


def test_a_record_outside_its_file_shard_is_not_read(store):
    index = np.load(store / "index.npy")
    index["offset"][0] = 2**63
    np.save(store / "index.npy", index)

    with pytest.raises(UserError, match="outside its file shard"):
        flatout.data.open(store)[0]


def test_a_header_that_is_a_pipe_is_refused_at_once(store):
    (store / "header.json").unlink()
    os.mkfifo(store / "header.json")

    with pytest.raises(UserError):
        read_header(store)


def test_what_is_written_has_a_checksum(store):
    plain = json.loads((store / "header.json").read_text())

    assert plain["schema"] == SCHEMA
    assert len(plain["check"]) == 32


def test_compressed_pixels_are_not_unpacked_beyond_the_size_that_is_told():
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    payload = bytes((pictures.ZSTD,)) + pictures.SIZE.pack(8, 8, 3) + bomb

    assert len(bomb) < 16_000
    with pytest.raises(BadSample, match="tells of 192 bytes"):
        pictures.pixels(memoryview(payload))


@pytest.mark.parametrize("size", [(1 << 20, 1 << 20, 3), (2**32 - 1, 2**32 - 1, 255)])
def test_compressed_pixels_that_are_too_many_are_not_unpacked(size):
    zstandard = pytest.importorskip("zstandard")
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(300)))
    payload = bytes((pictures.ZSTD,)) + pictures.SIZE.pack(*size) + frame

    with pytest.raises(BadSample, match="too large"):
        pictures.pixels(memoryview(payload))


def test_a_qoi_image_that_tells_of_more_pixels_than_it_can_hold_is_not_unpacked():
    pytest.importorskip("qoi")
    payload = bytes((pictures.QOI,)) + b"qoif" + struct.pack(">IIBB", 20_000, 20_000, 4, 0)

    with pytest.raises(BadSample, match="too large"):
        pictures.pixels(memoryview(payload + bytes(16)))


@pytest.mark.parametrize("kind", ["qoi", "zstd", "raw"])
def test_whole_images_are_unpacked_as_before(tmp_path, kind):
    pytest.importorskip("qoi")
    pytest.importorskip("zstandard")
    photos = image_folder(tmp_path / "photos", 4)
    packed(photos, tmp_path / "a", encoding=Encoding(kind=kind))
    packed(photos, tmp_path / "b")

    a, b = (flatout.data.open(tmp_path / name, order="source") for name in "ab")

    assert all(np.array_equal(x[0], y[0]) for x, y in zip(a, b, strict=True))


def test_a_tar_member_of_a_claimed_tebibyte_takes_no_memory(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("0.bin")
        info.size = 1 << 40
        archive.addfile(info)
    (tmp_path / "a.tar").write_bytes(stream.getvalue())
    source = open_source(str(tmp_path / "a.tar"), work=tmp_path, on_bad="skip")

    with pytest.raises(BadSample, match="cut off"):
        source.read(0)


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret.jpeg", "link.jpeg"])
def test_a_parquet_path_brings_in_nothing_from_outside_its_folder(tmp_path, name):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "secret.jpeg").write_bytes(file_bytes(1))
    (tmp_path / "p").mkdir()
    (tmp_path / "p/link.jpeg").symlink_to("../secret.jpeg")
    table = pa.table({"image": [{"bytes": None, "path": name}], "label": [1]})
    pq.write_table(table, tmp_path / "p/a.parquet")
    source = open_source(str(tmp_path / "p"), work=tmp_path / "work", on_bad="skip")

    with pytest.raises(BadSample, match="outside"):
        source.read(0)


@pytest.mark.parametrize("name", ["/etc/hostname", "../a.arrow"])
def test_a_saved_data_set_names_only_files_of_its_folder(tmp_path, name):
    pytest.importorskip("pyarrow")
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.arrow").write_bytes(b"")
    (tmp_path / "p/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))

    with pytest.raises(UserError, match="outside"):
        open_source(str(tmp_path / "p"), work=tmp_path / "work", on_bad="skip")


def test_a_loop_of_links_counts_every_image_once(tmp_path):
    photos = image_folder(tmp_path / "photos", 6)
    (photos / "cat/again").symlink_to("..")
    (photos / "dog/self").symlink_to(".")

    source = open_source(str(photos), work=tmp_path, on_bad="raise")

    assert len(source) == 6


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_an_image_that_is_no_regular_file_is_a_bad_sample(tmp_path, make):
    photos = image_folder(tmp_path / "photos", 3)
    make(photos / "cat/0009.jpeg")
    source = open_source(str(photos), work=tmp_path, on_bad="skip")

    with pytest.raises(BadSample, match="no regular file"):
        source.read(source.names.index("cat/0009.jpeg"))


def test_a_tar_of_whole_members_is_read_to_its_last_byte(tmp_path):
    path = tar(tmp_path / "a.tar", [("0.bin", b"x" * 512)])
    cut = path.read_bytes()[: 512 + 512]
    path.write_bytes(cut)

    source = open_source(str(path), work=tmp_path, on_bad="skip")

    assert source.read(0) == (b"x" * 512,)
