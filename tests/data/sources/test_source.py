import io
import os

import pytest

from flatout.data.sources import open_source, source
from tests.data.packs import tar


@pytest.fixture
def short_reads(monkeypatch):
    """Let each call of the system give three bytes at most, as Linux gives 2 GiB at most."""

    class Short(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3])

    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 3), at))
    monkeypatch.setattr(
        source, "open", lambda path, mode: io.BufferedReader(Short(path, mode)), raising=False
    )


def test_a_member_that_one_call_does_not_read_is_whole(tmp_path, short_reads):
    path = tar(tmp_path / "a.tar", [("0.txt", b"a long text"), ("1.txt", b"and another")])

    found = open_source(str(path), work=tmp_path / "work")

    assert [found.read(number) for number in range(2)] == [("a long text",), ("and another",)]


def test_a_line_that_one_call_does_not_read_is_whole(tmp_path, short_reads):
    (tmp_path / "a.txt").write_text("a long text\nand another\n")

    found = open_source(str(tmp_path / "a.txt"), work=tmp_path / "work")

    assert [found.read(number) for number in range(2)] == [("a long text",), ("and another",)]
