"""Nothing of a lever stays in the process once its session has ended.

One process plays every lever on a small training, through the seams' own methods, and compares what
it finds in torch, in Python and in itself before with what is there after the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout import techniques

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
FAMILIES = ("batch", "compute", "memory", "model", "optimizer", "precision")
NAMES = [name for name in techniques.names() if techniques.technique_class(name).family in FAMILIES]
TOLD = {
    "cpu_threads": {"torch.get_num_threads"},
    "tf32": {"float32 matmul precision"},
    "cudnn_autotune": {"cudnn.benchmark"},
    # Its losses stay scaled for as long as the script trains: steps must go on taking that back.
    "fp16_autocast": {"hooks of optimizers"},
}
"""What a lever sets for the process by design."""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return by lever what became of it and what it left."""
    folder = tmp_path_factory.mktemp("undone")
    subprocess.run(
        [sys.executable, str(HERE / "undone.py"), str(folder / "found.json"), *NAMES],
        check=True,
        cwd=folder,
        # Nothing has to be compiled to see what a compiling lever leaves.
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "TORCHDYNAMO_DISABLE": "1"},
        timeout=900,
        capture_output=True,
    )
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_it_stays_in_the_process(played, name):
    left = set(played[name]["left"]) - TOLD.get(name, set())

    assert left == set(), played[name]


def test_many_levers_acted(played):
    acted = [name for name, found in played.items() if found["status"] == "applied"]

    assert len(acted) > len(NAMES) / 3, {n: f["why"] for n, f in played.items()}


def test_what_stays_is_noticed(played):
    assert set(played["a lever that cleans up nothing"]["left"]) == {
        "torch.nn.functional.gelu",
        "threads",
        "sys.stdout",
        "torch.get_num_threads",
    }
