"""Why no script is put under DeepSpeed's ZeRO as it is: docs/deepspeed.md rests on these.

Each habit trains otherwise, and nothing says so. Should one of these fail with a newer DeepSpeed,
the decision is to be made again.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / "tests/scripts/ranks/under_deepspeed.py"
FOLDER = os.environ.get("DEEPSPEED_FOLDER", "")
"""Where `pip install --target` put it: what it asks for besides torch is small."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER and Path(FOLDER).is_dir()) and importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: docs/deepspeed.md has the command",
    ),
]


def trained(habit, stage):
    paths = [FOLDER, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), habit, str(stage)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("FOUND ")] or [done.stderr]
    found = json.loads(line.removeprefix("FOUND "))
    return found["alone"], found["deepspeed"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loop_without_habits_trains_the_same(stage):
    alone, under = trained("none", stage)

    assert under["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_finds_no_gradients(stage):
    alone, under = trained("clip", stage)

    assert min(alone["norms"]) > 0.1
    assert set(under["norms"]) == {0.0}
    assert under["losses"] != pytest.approx(alone["losses"], rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_to_weights_is_lost(stage):
    alone, under = trained("write", stage)

    assert under["losses"] != pytest.approx(alone["losses"], rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_that_rests_is_stepped_on(stage):
    alone, under = trained("rest", stage)

    assert under["losses"] != pytest.approx(alone["losses"], rel=1e-4)
