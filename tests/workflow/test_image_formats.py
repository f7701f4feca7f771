"""`flatout pack --formats` on real files: sizes and pixels are those of the formats."""

import json

import numpy as np
import pytest
from PIL import Image

from flatout.cli import call
from flatout.records.errors import UserError
from flatout.reporting.pack import render_formats
from flatout.workflow import image_formats
from flatout.workflow.image_formats import compare_formats
from tests.data.packs import file_bytes, image_folder, tar

LOSSLESS = {"as it is", "png", "webp lossless", "qoi", "zstd", "raw"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    photos = image_folder(tmp_path_factory.mktemp("formats") / "photos", size=(64, 48))
    return compare_formats(str(photos), images_per_s=100.0), photos


def costs(found):
    return {cost.name: cost for cost in found.costs}


def test_every_format_is_there_and_the_lossless_ones_give_the_same_pixels(compared):
    found, _ = compared

    exact = {name for name, cost in costs(found).items() if cost.difference == 0}
    assert set(costs(found)) == LOSSLESS | {"jpeg", "webp"}
    assert exact == LOSSLESS
    assert found.images == 12


def test_bytes_are_those_of_the_files_and_of_the_pixels(compared):
    found, photos = compared

    sizes = [path.stat().st_size for path in photos.rglob("*.jpeg")]
    own = costs(found)["as it is"]
    assert own.bytes_per_image == pytest.approx(np.mean(sizes) + 1)  # the tag of a payload
    assert own.total_bytes == pytest.approx(sum(sizes) + 12)
    assert costs(found)["raw"].bytes_per_image == 64 * 48 * 3 + 9 + 1


def test_cores_follow_from_what_the_training_takes(compared):
    found, _ = compared

    for cost in found.costs:
        assert cost.cores_needed == pytest.approx(100.0 / cost.images_per_s_per_core)


def test_what_does_not_fit_into_memory_comes_no_faster_than_storage(compared):
    found, _ = compared
    plain = found.to_json()
    plain["free_memory_bytes"] = int(costs(found)["raw"].total_bytes) - 1

    lines = [line for line in render_formats(plain).splitlines() if line[:1].strip()]
    rows = {line.split()[0]: line for line in lines}

    assert "(storage)" in rows["raw"]
    assert "(storage)" not in rows["as"]


def test_free_memory_is_that_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr(image_formats, "free_memory_bytes", lambda: 100)
    monkeypatch.setattr(image_formats, "_read_rate", lambda _: 1_000.0)
    photos = image_folder(tmp_path / "photos", count=4, size=(64, 48))

    found = compare_formats(str(photos))

    assert found.free_memory_bytes == 100
    assert costs(found)["raw"].images_per_s == pytest.approx(1_000 / (64 * 48 * 3 + 10))


def test_a_damaged_image_is_left_out(tmp_path):
    photos = image_folder(tmp_path / "photos", count=4)
    next(photos.rglob("*.jpeg")).write_bytes(b"\xff\xd8\xff broken")

    assert compare_formats(str(photos)).images == 3


def test_an_image_that_webp_cannot_hold_is_left_out(tmp_path):
    photos = image_folder(tmp_path / "photos", count=4)
    Image.new("L", (17_000, 2)).save(photos / "cat/wide.png")

    assert compare_formats(str(photos)).images == 4


def test_images_of_a_tar_have_no_rate_of_storage(tmp_path):
    tar(tmp_path / "a.tar", [(f"{n}.jpg", file_bytes(n)) for n in range(3)])

    found = compare_formats(str(tmp_path / "a.tar"))

    assert found.read_bytes_per_s is None
    assert "only a folder of files shows it" in " ".join(render_formats(found.to_json()).split())


def test_a_source_without_images_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")

    with pytest.raises(UserError, match="holds no images"):
        compare_formats(str(tmp_path / "a.txt"))


def test_the_command_prints_the_fastest_first_and_writes_json(tmp_path, capsys):
    photos = image_folder(tmp_path / "my photos", size=(256, 192))

    code = call(["pack", "--formats", str(photos), "--json", str(tmp_path / "f.json")])

    out = capsys.readouterr().out
    result = json.loads((tmp_path / "f.json").read_text())
    assert code == 0
    assert result["schema"] == "flatout.formats/1"
    assert out.startswith("As raw the images come")  # nothing to decode is faster than decoding
    assert f"flatout pack '{photos}' DST --encode raw" in " ".join(out.split())
    assert sorted(path.name for path in photos.iterdir()) == ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    "arguments", [["--formats"], ["--formats", "a", "b"], ["a", "b", "--images-per-s", "5"]]
)
def test_options_that_do_not_go_together_are_refused(arguments, capsys):
    assert call(["pack", *arguments]) == 2
    assert "--formats" in capsys.readouterr().err
