"""The photographs: made from what is installed, the same every time."""

import pytest
from PIL import Image, ImageChops, ImageStat

from tests.paths import ROOT
from tests.support.programs import python

SCRIPT = ROOT / "scenarios/photographs.py"


def make(folder, count, *options):
    done = python(["-W", "error", SCRIPT, folder, "--count", str(count), *options])
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))
    }


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    make(folder, 18)
    return folder


def test_every_class_has_its_folder_and_its_share(photographs):
    counts = {path.name: len(list(path.iterdir())) for path in photographs.iterdir()}

    assert len(counts) == 9
    assert set(counts.values()) == {2}


def test_they_look_like_photographs_on_the_web(photographs):
    paths = list(photographs.rglob("*.jpg"))

    seen = {shape(path) for path in paths}
    assert seen <= {("RGB", (500, 375)), ("RGB", (375, 500)), ("RGB", (500, 333))}
    assert 30_000 < sum(path.stat().st_size for path in paths) / len(paths) < 150_000


def shape(path):
    with Image.open(path) as image:
        return image.mode, image.size


def test_the_same_index_gives_the_same_file(photographs, tmp_path):
    make(tmp_path, 18, "--processes", "1")

    assert contents(tmp_path) == contents(photographs)


@pytest.mark.chaos
def test_an_interrupted_run_goes_on(photographs, tmp_path):
    make(tmp_path, 5)
    first = (tmp_path / "astronaut/00000.jpg").stat().st_mtime_ns

    said = make(tmp_path, 18)

    assert "18 images, 13 new" in said
    assert contents(tmp_path) == contents(photographs)
    assert (tmp_path / "astronaut/00000.jpg").stat().st_mtime_ns == first


def test_png_holds_the_same_picture(photographs, tmp_path):
    make(tmp_path, 1, "--format", "png")

    with (
        Image.open(tmp_path / "astronaut/00000.png") as exact,
        Image.open(photographs / "astronaut/00000.jpg") as rounded,
    ):
        difference = ImageStat.Stat(ImageChops.difference(exact, rounded)).mean
    assert max(difference) < 10


def test_without_one_package_its_classes_are_left_out(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'sklearn' else find(n, *a)\n"
        f"sys.argv = ['photographs.py', {str(blocked)!r}, '--count', '9', '--processes', '1']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )

    done = python(["-c", code])

    assert "7 images, 7 new" in done.stdout, done.stderr
    assert not (blocked / "china").exists()
