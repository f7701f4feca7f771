"""Trainers that are killed outright: their workers end, and no shared memory stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.left_behind import left_behind, left_since
from tests.paths import ROOT

SCRIPT = """
import sys
import time
from flatout.data.byte_batches import ring
from tests.data.plain_pictures import plain_loader

if __name__ == "__main__":
    loader = plain_loader(workers=2, persistent_workers=True)
    iterator = iter(loader)
    held = [next(iterator), next(iterator)]  # is in use when the trainer is killed
    assert ring._THEIRS, "no block of the ring is in use"
    print(*(worker.pid for worker in iterator._workers), flush=True)
    while True:
        time.sleep(0.01)
        next(iterator, None)
"""


@pytest.mark.chaos
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_a_killed_trainer_leaves_no_worker_and_no_shared_memory():
    before = left_behind()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    started = [Path("/proc", pid) for pid in child.stdout.readline().decode().split()]
    assert len(started) == 2
    assert all(process.exists() for process in started)

    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()

    ends_at = time.monotonic() + 60
    while any(process.exists() for process in started) and time.monotonic() < ends_at:
        time.sleep(0.1)
    assert [process for process in started if process.exists()] == []
    assert left_since(before) == set()
