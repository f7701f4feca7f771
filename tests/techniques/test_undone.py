"""Nothing of a technique stays in the process once its session has ended.

One process plays every technique on a small training, through the hook points' own methods, and
compares what it finds in torch, in Python and in itself before with what is there after the end.
It plays each twice, on fresh inputs: what comes out of the hook points is the same, and of what
goes in only model and optimizer are changed in place, as `flatout.records.technique` says."""

import json
import os
import subprocess
import sys

import pytest

from flatout.records import catalogue
from tests.paths import ROOT

pytestmark = pytest.mark.slow
HERE = ROOT / "tests/techniques"
ROOT = HERE.parents[1]
NAMES = catalogue.names()
ON_CUDA = {
    *("activation_offload", "async_copies", "attention_backend", "cudnn_autotune"),
    *(
        "device_prefetch",
        "empty_cache_steps",
        "expandable_segments",
        "fp8_training",
        "offloaded_optimizer",
    ),
    *("pinned_memory", "tf32"),
}
ON_TEXTS = {"dynamic_padding", "sequence_packing"}
ON_FILES = {"block_order", "device_preprocess", "length_buckets", "packed_data", "read_ahead"}
ELSEWHERE = {
    "cpu_allocator": "acts on the environment of a process that is yet to start",
    "data_parallel": "acts in processes of several ranks; tests/parallel has them",
}
ACTING = sorted({*NAMES} - ON_CUDA - ON_TEXTS - ON_FILES - {*ELSEWHERE})
"""What acts on this training: all that needs no device, texts or data sets it does not have."""
MIN_STEPS = 4
TOLD = {
    "cpu_threads": {"torch.get_num_threads"},
    "tf32": {"float32 matmul precision"},
    "cudnn_autotune": {"cudnn.benchmark"},
    # Its losses stay scaled for as long as the script trains: steps must go on taking that back.
    "fp16_autocast": {"hooks of optimizers"},
}
"""What a technique sets for the process by design."""
ONCE = {"fp16_autocast"}
"""Its steps would be taken back by those of both times."""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return by technique what became of it and what it left."""
    folder = tmp_path_factory.mktemp("undone")
    subprocess.run(
        [sys.executable, str(HERE / "undone.py"), str(folder / "found.json"), *NAMES],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        timeout=900,
        capture_output=True,
    )
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_it_stays_in_the_process(played, name):
    left = set(played[name]["left"]) - TOLD.get(name, set())

    assert left == set(), played[name]


@pytest.mark.parametrize("name", ACTING)
def test_it_acted(played, name):
    assert played[name]["status"] == "applied", played[name]["why"]


@pytest.mark.parametrize("name", [name for name in ACTING if name not in ONCE])
def test_on_fresh_inputs_it_does_the_same_again(played, name):
    assert played[name]["steps"] >= MIN_STEPS
    assert played[name]["differs"] == []


@pytest.mark.parametrize("name", NAMES)
def test_of_its_inputs_only_model_and_optimizer_are_changed_in_place(played, name):
    assert played[name]["changed"] == []


def test_what_is_changed_in_place_or_not_repeated_is_noticed(played):
    careless = played["a technique that cleans up nothing"]

    assert careless["changed"] == ["backward", "forward", "loader", "the same optimizer"]
    assert careless["differs"] == ["batches", "forward", "optimizer"]


def test_what_stays_is_noticed(played):
    assert set(played["a technique that cleans up nothing"]["left"]) == {
        "torch.nn.functional.gelu",
        "threads",
        "sys.stdout",
        "torch.get_num_threads",
    }
