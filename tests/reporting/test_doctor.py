import pytest

from flatout.records.finding import BAD, OK, WARN, Check
from flatout.records.machine import Device, Machine
from flatout.reporting.doctor import render_doctor

MACHINE = Machine(
    device=Device(kind="cpu", name="Test CPU", memory_bytes=8 * 1024**3),
    logical_cores=4,
    usable_cores=2,
    physical_cores=2,
    memory_bytes=8 * 1024**3,
    shm_free_bytes=64 * 1024**2,
)
WELL = Check(status=OK, what="2 cores, all of them usable")
SMALL = Check(
    status=WARN,
    what="/dev/shm: 64.0 MiB free",
    why="loader workers put their batches there and are killed when it is full",
    next="start the container with --shm-size=2g",
)
WRONG = Check(status=BAD, what="torch is built without CUDA", why="the GPU stays idle", next="x")


def test_the_report_of_doctor(snapshot):
    assert render_doctor(MACHINE, [WELL, SMALL, WRONG]) == snapshot


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ([WELL], "all 1 checks are well"),
        ([WELL, SMALL], "it works, and 1 of 2 checks may cost speed"),
        ([WELL, SMALL, WRONG], "1 of 3 checks must be fixed first"),
    ],
)
def test_the_first_line_is_the_answer(checks, words):
    assert words in render_doctor(MACHINE, checks, width=200).splitlines()[0]
