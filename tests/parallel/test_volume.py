"""What ranks send each other under each way to spread a model, as the page has it."""

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@pytest.mark.slow
@pytest.mark.smoke
def test_strategies_send_what_the_pages_say(tmp_path):
    path = tmp_path / "found.json"
    command = [*TORCHRUN, str(ROOT / "tests/parallel/spread_steps.py"), str(path)]

    subprocess.run(command, check=True, capture_output=True, timeout=300)

    found = json.loads(path.read_text())
    parameters = found["ddp"]["dp all_reduce"]["bytes"]
    assert len(found) == 11
    assert found["zero2"]["dp reduce_scatter"]["bytes"] == parameters
    assert found["zero2"]["dp all_gather"]["bytes"] == parameters
    assert found["zero3"]["dp all_gather"]["bytes"] == 2 * parameters
    assert found["hybrid"]["replicate all_reduce"]["bytes"] == parameters / 2
    # Four microbatches: ZeRO-3 gathers its blocks again in each of them.
    gathers = [found[f"1f1b and zero{n}"]["dp all_gather"]["calls"] for n in (2, 3)]
    assert gathers == [2, 10]
