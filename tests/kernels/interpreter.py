"""Kernels in Triton's interpreter, in a process of their own."""

import functools
import importlib.util
import json
import os

import pytest

from tests.paths import ROOT
from tests.support.programs import python

SCRIPTS = ROOT / "tests/scripts/kernels"
PLACES = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
NO_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"
"""Triton 3.6's interpreter takes numbers out of arrays with one entry, which numpy 2.4 refuses."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: no kernel to test"
)


@functools.cache
def printed(script, **variables):
    """Return the JSON that a script prints; skip where this Triton cannot interpret."""
    done = python(
        [str(SCRIPTS / script)], env={**os.environ, "PYTHONPATH": PLACES, **dict(variables)}
    )
    # A kernel with another way alongside it logs why it could not be used, and goes on.
    if NO_INTERPRETER in done.stderr:
        pytest.skip("this Triton's interpreter cannot work with this numpy")
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads(done.stdout)
