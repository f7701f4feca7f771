"""What ranks send each other: one traced process against four real ones, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "spread_steps.py"
ROOT = SCRIPT.parent.parent.parent
GIVEN = {
    "check": True,
    "capture_output": True,
    "timeout": 300,
    "env": {**os.environ, "PYTHONPATH": str(ROOT)},
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def run(command, path):
    subprocess.run([*command, str(path)], **GIVEN)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "ranks.json"
    run((*TORCHRUN, str(SCRIPT), "real"), path)
    return [json.loads(path.with_name(f"ranks.json.{rank}").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("rank", [0, 3])
def test_a_traced_rank_exchanges_what_the_real_one_does(real, rank, tmp_path):
    path = tmp_path / "traced.json"

    subprocess.run([sys.executable, str(SCRIPT), "traced", str(path), str(rank), "4"], **GIVEN)

    traced = json.loads(path.read_text())
    assert len(traced) == 11
    assert traced == real[rank]


@pytest.mark.slow
def test_strategies_send_what_the_pages_say(real):
    found = real[0]
    parameters = found["ddp"]["dp all_reduce"]["bytes"]

    assert found["zero2"]["dp reduce_scatter"]["bytes"] == parameters
    assert found["zero2"]["dp all_gather"]["bytes"] == parameters
    assert found["zero3"]["dp all_gather"]["bytes"] == 2 * parameters
    assert found["hybrid"]["replicate all_reduce"]["bytes"] == parameters / 2
    # Four microbatches: ZeRO-3 gathers its blocks again in each of them.
    gathers = [found[f"1f1b and zero{n}"]["dp all_gather"]["calls"] for n in (2, 3)]
    assert gathers == [2, 10]


@pytest.mark.slow
def test_one_process_traces_a_rank_of_a_thousand(tmp_path):
    path = tmp_path / "found.json"

    run((sys.executable, str(SCRIPT), "thousand"), path)

    found = json.loads(path.read_text())
    # Products of 8,192 x 32,768, split over 8; norms and the bias of the second are whole.
    block = 4 * (2 * 8192 * 32768 // 8 + 32768 // 8 + 8192 + 2 * 8192)
    assert found["dp reduce_scatter"] == {"calls": 4, "bytes": 4 * block}
    assert found["mib"] < 1024  # the whole model has 8 GiB
