"""The suite on tiling, and the lesson behind it: real loops on small matrices."""

import ctypes
import errno
import mmap
import shutil
import sys

import pytest

from benchmarks.bench import Bench
from benchmarks.suites import tiling
from scenarios import tiling as lesson
from scenarios.tiling import Counter
from tests.benchmarks.made_up import a_machine, a_pair
from tests.support.programs import python

PAGE_FAULTS = (1, 2)
"""PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS: the kernel's own, in virtual machines, too."""
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler is installed"
)


@needs_compiler
def test_every_way_is_measured_in_fresh_processes(tmp_path):
    bench = Bench(machine=a_machine(), work=tmp_path, say=lambda line: None)

    record = tiling.run(bench, rounds=3, size=128)

    assert len(record.raw["rounds"]) == 3
    assert [row[0] for row in record.table[1:]] == [
        *(f"product, {way}" for way in ("naive", "rows", "tiled 16", "tiled 32", "tiled 64")),
        *("product, registers", "product, torch"),
        *("convolution, naive", "convolution, registers", "convolution, torch"),
        *(f"attention, {way}" for way in ("naive", "registers", "tiled", "torch")),
    ]


@needs_compiler
def test_the_lesson_prints_a_table_of_each_subject():
    done = python([str(tiling.LESSON), "--size", "64", "--repeats", "1"])

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("against naive") == 3
    assert ("from memory" in done.stdout) is not ("is not counted" in done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="perf_event_open is Linux's")
def test_a_counter_counts_what_happens_during_a_call():
    try:
        faults = Counter(*PAGE_FAULTS)
    except OSError as error:
        pytest.skip(f"no counter of the kernel: {error}")

    pages = 500
    fresh = mmap.mmap(-1, pages * mmap.PAGESIZE)

    def touch():
        for page in range(pages):
            fresh[page * mmap.PAGESIZE] = 1

    first, second = faults.during(touch), faults.during(touch)

    assert pages // 2 <= first < 2 * pages  # a kernel may map several pages for one fault
    assert second < pages // 10  # all of them are mapped by then


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT])
def test_without_counters_the_reason_is_said(monkeypatch, number):
    class Kernel:
        def syscall(self, *_):
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(lesson.ctypes, "CDLL", lambda *_, **__: Kernel())

    found, reason = lesson.counters()

    assert not found
    assert ("perf_event_paranoid" in reason) is (number != errno.ENOENT)


def test_a_size_that_loops_cannot_do_is_refused():
    done = python([str(tiling.LESSON), "--size", "100"])

    assert done.returncode == 2
    assert "multiple of 64" in done.stderr


@pytest.mark.parametrize(("ratio", "low", "holds"), [(20.0, 12.0, True), (20.0, 9.0, False)])
def test_the_claim_needs_the_whole_interval(ratio, low, holds):
    assert tiling.holds({tiling.BEST: a_pair(ratio, low)}) is holds
