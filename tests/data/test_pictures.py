"""Images that Pillow refuses, and those that an encoding cannot hold, are bad samples."""

import struct
import zlib

import pytest
from PIL import Image

from flatout.data import pictures
from flatout.data.format import BadSample, Encoding
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, image_folder, packed, skipped_in

DECODED = ["raw", "zstd", "jpeg"]


def png_of_size(width, height):
    """Return a small PNG whose header claims another size."""
    plain = file_bytes(0, "png")
    head = b"IHDR" + struct.pack(">II", width, height) + plain[24:29]
    return plain[:12] + head + struct.pack(">I", zlib.crc32(head)) + plain[33:]


def bmp_of_size(width, height):
    """Return a small BMP whose header claims another size; its end says nothing."""
    plain = file_bytes(0, "bmp")
    return plain[:18] + struct.pack("<ii", width, height) + plain[26:]


def folder_with(tmp_path, data, name="cat/0000.png"):
    source = image_folder(tmp_path / "photos", suffix="png")
    (source / name).write_bytes(data)
    return source


@pytest.mark.parametrize("kind", DECODED)
def test_one_picture_too_large_for_pillow_is_named_or_left_out(tmp_path, kind):
    source = folder_with(tmp_path, png_of_size(60_000, 60_000))

    with pytest.raises(UserError, match=r"cat/0000\.png: the image is too large .*--on-bad skip"):
        packed(source, tmp_path / "a", encoding=Encoding(kind=kind))
    header = packed(source, tmp_path / "b", encoding=Encoding(kind=kind), on_bad="skip")

    assert (header.samples, header.skipped) == (11, 1)
    assert skipped_in(tmp_path / "b")[0]["name"] == "cat/0000.png"


def test_a_picture_that_only_pillow_could_check_is_a_bad_sample_when_it_is_too_large(tmp_path):
    source = folder_with(tmp_path, bmp_of_size(60_000, 60_000), "cat/0000.bmp")

    header = packed(source, tmp_path / "a", on_bad="skip")

    assert (header.samples, header.skipped) == (12, 1)
    assert "too large" in skipped_in(tmp_path / "a")[0]["reason"]


def test_a_picture_too_wide_for_jpeg_is_a_bad_sample(tmp_path):
    wide = tmp_path / "wide.png"
    Image.new("RGB", (70_000, 1)).save(wide)
    source = folder_with(tmp_path, wide.read_bytes())

    header = packed(source, tmp_path / "a", encoding=Encoding(kind="jpeg"), on_bad="skip")

    assert (header.samples, header.skipped) == (11, 1)


RAISED = [struct.error("unpack"), KeyError(1), SyntaxError("broken"), OSError("cut"), MemoryError()]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["load", "getexif"])
def test_whatever_pillow_raises_about_a_picture_is_a_bad_sample(monkeypatch, error, method):
    def broken(_self):
        raise error

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile." + method, broken)

    with pytest.raises(BadSample):
        pictures.encode(b"\0" + file_bytes(0, "png"), Encoding(kind="raw"))


def test_a_missing_package_is_no_fault_of_the_picture(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)

    with pytest.raises(UserError, match="needs zstandard"):
        pictures.encode(b"\0" + file_bytes(0, "png"), Encoding(kind="zstd"))


def test_a_picture_that_was_not_read_from_its_file_yet_may_turn_out_damaged(tmp_path):
    (tmp_path / "a.jpeg").write_bytes(file_bytes(0)[:-200])

    with Image.open(tmp_path / "a.jpeg") as image, pytest.raises(BadSample, match="cut off"):
        pictures.from_source(image)
