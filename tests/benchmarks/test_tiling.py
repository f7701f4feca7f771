"""The suite on tiling, and the example behind it: real loops on small matrices."""

import shutil
import subprocess
import sys

import pytest

from benchmarks.bench import Bench
from benchmarks.suites import tiling
from tests.benchmarks.made_up import a_machine, a_pair

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler is installed"
)


@needs_compiler
def test_every_way_is_measured_in_fresh_processes(tmp_path):
    bench = Bench(machine=a_machine(), work=tmp_path, say=lambda line: None)

    record = tiling.run(bench, rounds=3, size=128)

    assert len(record.raw["rounds"]) == 3
    ways = [row[0].partition(":")[0] for row in record.table[1:]]
    assert ways == ["naive", "rows", "tiled 16", "tiled 32", "tiled 64", "registers", "torch"]


@needs_compiler
def test_the_example_prints_a_table():
    done = subprocess.run(
        [sys.executable, str(tiling.EXAMPLE), "--size", "64", "--repeats", "1"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "against naive" in done.stdout


def test_a_size_that_loops_cannot_do_is_refused():
    done = subprocess.run(
        [sys.executable, str(tiling.EXAMPLE), "--size", "100"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "multiple of 64" in done.stderr


@pytest.mark.parametrize(("ratio", "low", "holds"), [(20.0, 12.0, True), (20.0, 9.0, False)])
def test_the_claim_needs_the_whole_interval(ratio, low, holds):
    assert tiling.holds({"registers": a_pair(ratio, low)}) is holds
