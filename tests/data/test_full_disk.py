"""A disk that fills up is named as such wherever it happens, and the next call goes on."""

import errno
from pathlib import Path

import numpy as np
import pytest

from flatout.records.errors import UserError
from tests.data.packs import digest, image_folder, packed
from tests.support.programs import python

LIMITED = """
import functools, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))
from flatout.cli import main
from flatout.data import writer as pack
pack.PackOptions = functools.partial(pack.PackOptions, shard_bytes=50_000)
main()
"""
"""`flatout pack` that cannot write a file of more than some bytes, as on a disk that is full."""


def run_limited(count, *arguments):
    code = LIMITED.format(bytes=count)
    return python(["-c", code, "pack", *map(str, arguments)])


@pytest.mark.parametrize(
    "name", ["plan.json", "index.npy", "names.txt", "skipped.jsonl", "header.json"]
)
def test_a_disk_that_is_full_beside_the_file_shards_is_named(tmp_path, monkeypatch, name):
    source = image_folder(tmp_path / "photos")
    packed(source, tmp_path / "whole")
    replace = Path.replace

    def full(self, target):
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(UserError, match=r"the disk is full .*run the same command again"):
            packed(source, tmp_path / "a")
    assert not list((tmp_path / "a").glob("*.draft*"))
    packed(source, tmp_path / "a")

    assert digest(tmp_path / "a") == digest(tmp_path / "whole")


@pytest.mark.chaos
def test_a_disk_that_has_no_room_for_the_index_is_no_defect_of_flatout(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10_000))

    done = run_limited(300_000, tmp_path / "a.npy", tmp_path / "a")

    assert done.returncode == 2, done.stderr
    assert "the disk is full" in done.stderr
    assert len(list((tmp_path / "a").glob("*.bin"))) == 3  # so it was the index
    assert packed(tmp_path / "a.npy", tmp_path / "a", shard_bytes=50_000).samples == 10_000


@pytest.mark.chaos
def test_a_disk_that_has_no_room_for_the_arrow_file_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": ["a long text" * 100] * 1000}), tmp_path / "a.parquet")

    done = run_limited(100_000, tmp_path / "a.parquet", tmp_path / "a")

    assert done.returncode == 2, done.stderr
    assert "the disk is full" in done.stderr
    assert "a.parquet is written out as Arrow" in " ".join(done.stderr.split())
    assert not (tmp_path / "a").exists()


def test_another_trouble_of_the_disk_is_no_defect_of_flatout_either(tmp_path, monkeypatch):
    source = image_folder(tmp_path / "photos")

    def broken(*_arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("flatout.data.staging.sync", broken)

    with pytest.raises(UserError, match="Input/output error; run the same command again"):
        packed(source, tmp_path / "a")
