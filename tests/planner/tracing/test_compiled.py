"""A compiled step's interval against the truth: a real run by inductor on the CPU."""

import json
import shutil

import pytest

from tests.paths import ROOT
from tests.support.programs import python

SCRIPT = ROOT / "tests/scripts/memory/compiled_truth.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_run_takes_what_lies_between_its_graphs_and_eager_code():
    done = python(
        ["-c", f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"],
        cwd=ROOT,
        check=True,
    )

    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["low"] <= found["measured"] <= found["high"]
    assert found["measured"] < 0.95 * found["eager"]
