import shutil

import pytest

from flatout.core.errors import UserError
from flatout.data.format import Encoding
from flatout.data.sources import open_source
from flatout.data.verify import verify
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

    assert found.is_equal
    assert found.samples == 12


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "1", "CMYK", "I;16"])
@pytest.mark.parametrize("kind", ["raw", "qoi", "zstd"])
def test_images_of_every_mode_stay_what_they_are(tmp_path, mode, kind):
    pytest.importorskip("qoi")
    suffix = "tiff" if mode == "CMYK" else "png"
    source = image_folder(tmp_path / "photos", 6, suffix=suffix, mode=mode)
    packed(source, tmp_path / "a", encoding=Encoding(kind=kind))

    assert verified(source, tmp_path / "a").is_equal


def test_workers_verify_too(tmp_path):
    source = image_folder(tmp_path / "photos", 20)
    packed(source, tmp_path / "a", shard_bytes=4_000)

    assert verified(source, tmp_path / "a", workers=2).is_equal


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
