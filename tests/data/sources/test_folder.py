import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flatout.data.packed_store import PackedStore
from flatout.data.sources import open_source
from flatout.records.errors import UserError
from tests.data.packs import file_bytes, image_folder, packed, skipped_in

NOBODY = 65_534


def opened(target, folder, **options):
    return open_source(str(target), work=folder / "work", **options)


def test_classes_and_files_are_numbered_as_by_torchvision(tmp_path):
    for name in ("dog/b.jpeg", "dog/a.jpeg", "cat/deep/z.JPEG", "cat/y.jpeg", "cat/notes.txt"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(file_bytes(1))

    source = opened(tmp_path / "p", tmp_path)

    assert source.names == ("cat/y.jpeg", "cat/deep/z.JPEG", "dog/a.jpeg", "dog/b.jpeg")
    assert source.contents.classes == ("cat", "dog")
    assert source.contents.ignored == 1
    assert [source.read(n)[1] for n in range(4)] == [0, 0, 1, 1]


def test_hidden_folders_with_images_are_classes_and_gifs_are_none_as_to_torchvision(tmp_path):
    for name in (".old/a.png", ".git/config", "cat/a.gif", "cat/b.png", "dog/c.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(file_bytes(1, "png"))

    source = opened(tmp_path / "p", tmp_path)

    assert source.contents.classes == (".old", "cat", "dog")
    assert source.names == (".old/a.png", "cat/b.png", "dog/c.png")
    assert source.labels.tolist() == [0, 1, 2]
    assert source.contents.ignored == 1


@pytest.mark.parametrize("hidden", [(), (".thumbnails/a.png",)])
def test_where_torchvision_takes_nothing_gifs_and_lone_images_are_packed(tmp_path, hidden):
    for name in ("gifs/cat/a.gif", "alone/a.gif", "alone/b.png", *(f"alone/{x}" for x in hidden)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(file_bytes(1, "png"))

    assert opened(tmp_path / "gifs", tmp_path).names == ("cat/a.gif",)
    assert opened(tmp_path / "alone", tmp_path).names[:2] == ("a.gif", "b.png")


def test_images_without_folders_have_no_label(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.jpeg").write_bytes(file_bytes(1))

    source = opened(tmp_path / "p", tmp_path)

    assert source.contents.structure == "single"
    assert source.read(0) == (file_bytes(1),)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: (p / "cat").mkdir()])
def test_a_folder_without_images_is_nothing_to_pack(tmp_path, make):
    (tmp_path / "p").mkdir()
    make(tmp_path / "p")

    with pytest.raises(UserError, match="holds no samples"):
        opened(tmp_path / "p", tmp_path)


def unreadable(path, monkeypatch):
    """Let a folder be unreadable, for root too."""
    plain = os.scandir

    def scandir(where="."):
        if str(where) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(where)

    monkeypatch.setattr(os, "scandir", scandir)


def test_an_unreadable_folder_is_named_or_left_out(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos")
    unreadable(source / "dog", monkeypatch)

    with pytest.raises(UserError, match=r"photos/dog: the folder cannot be read .*--on-bad skip"):
        opened(source, tmp_path)
    header = packed(source, tmp_path / "a", on_bad="skip")

    assert (header.samples, header.skipped) == (8, 1)
    assert skipped_in(tmp_path / "a")[0]["name"].endswith("photos/dog")


@pytest.mark.chaos
def test_a_folder_that_this_user_may_not_read_is_named():
    shared = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    shared.chmod(0o777)
    source = image_folder(shared / "photos")
    (source / "dog").chmod(0)
    child = os.fork()
    if not child:
        said = b"nothing"
        try:
            if not os.getuid():
                os.setgid(NOBODY)
                os.setuid(NOBODY)  # root may read everything
            opened(source, shared)
        except UserError as error:
            said = str(error).encode()
        finally:
            (shared / "said").write_bytes(said)
            os._exit(0)
    os.waitpid(child, 0)

    said = (shared / "said").read_text()
    (source / "dog").chmod(0o700)
    shutil.rmtree(shared)
    assert "photos/dog: the folder cannot be read" in said
    assert "--on-bad skip" in said


def test_any_file_name_is_packed(tmp_path):
    names = ["sp ace.jpeg", "line\nbreak.jpeg", "\uc2a4.jpeg", os.fsdecode(b"\xff.jpeg")]
    (tmp_path / "p/a b").mkdir(parents=True)
    for number, name in enumerate(names):
        (tmp_path / "p/a b" / name).write_bytes(file_bytes(number))

    packed(tmp_path / "p", tmp_path / "a")

    assert set(PackedStore(tmp_path / "a").names) == {f"a b/{name}" for name in names}


def test_nothing_there_is_answered_with_what_can_be_packed(tmp_path):
    with pytest.raises(UserError, match="a folder of images, a WebDataset"):
        opened(tmp_path / "nothing", tmp_path)
    (tmp_path / "a.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"a\.zip is not of a kind"):
        opened(tmp_path / "a.zip", tmp_path)
