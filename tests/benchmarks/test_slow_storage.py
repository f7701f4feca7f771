import mmap
import os

import numpy as np
import pytest

from benchmarks import run, slow_storage
from benchmarks.slow_storage import Late, Speed, counts_of, find_missing, mounted
from benchmarks.suites import slow_storage as suite
from tests.benchmarks.made_up import a_machine
from tests.data.page_cache import evict

DISK = Speed(seek_ms=10.0, mb_per_s=100.0, at_once=1)


class Clock:
    """A time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(slow_storage, "time", found)
    return found


def test_a_request_waits_for_its_seek_and_its_bytes(clock):
    Late(DISK).wait("/a", 0, 1_000_000)

    assert clock.now == pytest.approx(0.010 + 0.010)


def test_a_request_that_goes_on_where_the_last_one_of_its_file_ended_needs_no_seek(clock):
    late = Late(DISK)

    for name, begin in (("/a", 0), ("/b", 0), ("/a", 1000), ("/b", 5000)):
        late.wait(name, begin, 1000)

    assert late.counts() == {"requests": 4, "seeks": 3, "bytes": 4000}
    assert clock.now == pytest.approx(3 * 0.010 + 4 * 1e-5)


@pytest.mark.skipif(bool(find_missing()), reason=find_missing() or "nothing is missing")
def test_a_mounted_folder_has_the_same_files_and_counts_what_is_asked_for(tmp_path):
    plain = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "data" / "inner").mkdir(parents=True)
    (tmp_path / "data" / "inner" / "a.bin").write_bytes(plain)
    quick = Speed(seek_ms=0.1, mb_per_s=1e4, at_once=4)

    with mounted(tmp_path / "data", tmp_path / "mount", quick) as mount:
        path = mount / "inner" / "a.bin"
        assert path.read_bytes() == plain
        evict(path)
        before = counts_of(mount)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert mapped[1_000_000:1_100_000] == plain[1_000_000:1_100_000]
            mapped.close()
        asked = counts_of(mount)["bytes"] - before["bytes"]

    assert 100_000 <= asked < 1_000_000
    assert before["bytes"] == len(plain)
    assert not os.path.ismount(tmp_path / "mount")


def test_a_machine_without_the_storage_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "find_missing", lambda: "the slow storage needs a lake")

    assert not run.run_suite(suite.run, a_machine(), budget_s=1.0, root=tmp_path)

    assert "nothing measured: the slow storage needs a lake" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def made_up(**rates):
    """Return measurements with these megabytes per second, 1 for the other ways."""
    return [
        {
            "storage": storage,
            "way": way,
            "round": number,
            "wall_s": 1.0 + 0.01 * number,
            "sample_bytes": rates.get(way, 1.0) * 1e6,
            "requests": 10,
        }
        for storage in suite.STORAGES
        for way in suite.WAYS
        for number in range(4)
    ]


@pytest.mark.parametrize(("rate", "holds"), [(4.0, True), (2.0, False)])
def test_the_claim_is_about_blocks_against_single_random_reads(rate, holds):
    record = suite.record_of(made_up(**{suite.BLOCKS: rate}))

    assert record.holds is holds
    assert f"disk {rate:.2f}x" in record.finding
    assert {len(row) for row in record.table} == {4}


def test_one_storage_that_gains_too_little_is_enough_to_refuse_the_claim():
    measured = made_up(**{suite.BLOCKS: 4.0})
    for row in measured:
        if (row["storage"], row["way"]) == ("network", suite.BLOCKS):
            row["sample_bytes"] = 2e6

    assert not suite.record_of(measured).holds


def test_every_way_that_is_compared_is_measured():
    assert {way for pair in suite.PAIRS for way in pair} <= set(suite.WAYS)
