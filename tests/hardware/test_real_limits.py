"""A real process in a real control group: what it may use, and how many workers that feeds."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.support.programs import ran

GROUPS = Path("/sys/fs/cgroup")
MIB = 1024**2
LIMIT_BYTES = 1024 * MIB
VERSION_2 = {"cpu.max": "100000 100000", "memory.max": str(LIMIT_BYTES)}
VERSION_1 = {
    "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"},
    "memory": {"memory.limit_in_bytes": str(LIMIT_BYTES)},
}
"""One core's time, and a gibibyte."""
PROGRAM = """
import json
from flatout.hardware.limits import quota_cores
from flatout.hardware.machine import read_machine
from flatout.techniques.data.loader_workers import LoaderWorkers, most_workers
from tests.techniques.data.test_loader_workers import BUSY, followed

machine = read_machine(torch=False)
waiting = followed(read_ms=600.0, facts=BUSY, workers=1)
large = followed(read_ms=600.0, facts=BUSY | {"pss_bytes": 300 * 1024**2}, workers=1)
print(json.dumps({
    "quota": quota_cores(),
    "cores": machine.usable_cores,
    "memory": machine.memory_bytes,
    "busy": most_workers(followed(facts=BUSY, workers=1), machine),
    "waiting": most_workers(waiting, machine),
    "large": most_workers(large, machine),
    "offered": [x.num_workers for x in LoaderWorkers.candidates(waiting, machine)],
}))
"""
"""Workers that compute, that wait for storage, and that also hold 300 MiB each."""


@pytest.fixture
def group():
    """Make a control group of one core and a gibibyte; return its folders."""
    is_second = (GROUPS / "cgroup.controllers").exists()
    name = f"flatout-test-{os.getpid()}"
    wanted = {GROUPS / name: VERSION_2} if is_second else {}
    if not is_second:
        wanted = {GROUPS / controller / name: files for controller, files in VERSION_1.items()}
    try:
        for folder, files in wanted.items():
            folder.mkdir()
            for file, text in files.items():
                # Not made where the kernel has no such limit: a missing one is no file of ours.
                with (folder / file).open("r+") as limit:
                    limit.write(text)
        yield list(wanted)
    except OSError as error:
        pytest.skip(f"no control group with limits can be made here: {error}")
    finally:
        for folder in filter(Path.exists, wanted):
            folder.rmdir()


def limits_of(groups):
    """Return what a process finds that is in these groups from its first line on."""
    join = "".join(f"echo $$ > {folder}/cgroup.procs && " for folder in groups)
    done = ran(
        ["/bin/sh", "-c", f'{join} exec "$0" -c "$1"', sys.executable, PROGRAM],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "src"},
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_quota_and_memory_of_a_real_group_bound_the_workers(group):
    found = limits_of(group)

    assert (found["quota"], found["cores"], found["memory"]) == (1.0, 1, LIMIT_BYTES)
    assert (found["busy"], found["waiting"], found["large"]) == (1, 4, 1)
    assert max(found["offered"]) == 4


def test_a_process_outside_the_group_is_not_bounded_by_it(group):
    del group
    found = limits_of([])

    assert found["memory"] > LIMIT_BYTES
    assert found["waiting"] == 4 * found["cores"]
