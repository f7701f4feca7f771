import pytest

from flatout.hardware.load import Load
from flatout.records.machine import Device
from flatout.workflow.doctor import (
    cores,
    disk,
    huge_pages,
    memory,
    open_files,
    quiet,
    shared_memory,
    threads,
)
from tests.techniques.facts import GIB
from tests.techniques.facts import machine as a_machine


def machine(*, usable=8, logical=8, shm_free=GIB * 4, kind="cpu", **facts):
    return a_machine(
        device=Device(kind=kind, name="A", memory_bytes=1),
        logical_cores=logical,
        usable_cores=usable,
        shm_free_bytes=shm_free,
        facts={"system": "Linux-6"} | facts,
    )


def load(**changes):
    calm = {"wall_s": 1.0, "delay_share": 0.0, "foreign_share": 0.0, "steal_share": 0.0}
    return Load(minor_faults=0, **calm | changes)


def test_all_cores_usable_is_fine():
    assert cores(machine()).status == "ok"


def test_a_quota_below_the_cores_is_named():
    check = cores(machine(usable=2, logical=64, affinity_cores=64, quota_cores=2.5))

    assert check.status == "warn"
    assert "quota is 2.5" in check.what
    assert "OMP_NUM_THREADS=2" in check.next


def test_an_affinity_mask_below_the_cores_is_named():
    check = cores(machine(usable=4, logical=64, affinity_cores=4, quota_cores=None))

    assert check.status == "warn"
    assert "affinity mask leaves 4" in check.what


@pytest.mark.parametrize(
    ("text", "usable", "kind", "status"),
    [
        ("8", 8, "cpu", "ok"),
        ("16", 8, "cpu", "warn"),
        ("1", 8, "cpu", "warn"),
        ("1", 8, "cuda", "ok"),
        ("1", 1, "cpu", "ok"),
    ],
)
def test_a_thread_count_is_judged_by_the_cores_and_the_device(text, usable, kind, status):
    variables = {"OMP_NUM_THREADS": text}

    assert threads(machine(usable=usable, kind=kind, variables=variables)).status == status


def test_nothing_is_said_about_threads_that_nobody_set():
    assert threads(machine(variables={})) is None


def test_memory_without_swap_in_use_is_fine():
    assert memory(machine(swap_used_bytes=0)).status == "ok"


def test_swap_in_use_is_reported_with_the_limit():
    check = memory(machine(swap_used_bytes=GIB, memory_limit_bytes=16 * GIB))

    assert check.status == "warn"
    assert "1.00 GiB swapped out" in check.what
    assert "cgroup limit" in check.what


def test_roomy_shared_memory_is_fine():
    assert shared_memory(machine(shm_bytes=8 * GIB)).status == "ok"


def test_the_64_mib_of_a_plain_container_are_reported_with_the_flag_to_use():
    check = shared_memory(machine(shm_free=64 * 1024**2, shm_bytes=64 * 1024**2))

    assert check.status == "warn"
    assert "--shm-size" in check.next


def test_no_shared_memory_at_all_is_bad():
    assert shared_memory(machine(shm_free=0, shm_bytes=0)).status == "bad"


def test_a_system_without_dev_shm_is_not_asked_for_it():
    assert shared_memory(machine(system="macOS-15", shm_free=0)) is None


def test_a_low_limit_on_open_files_can_be_raised_to_what_is_allowed():
    check = open_files(machine(open_files_soft=1024, open_files_hard=2048))

    assert check.status == "warn"
    assert check.next == "ulimit -n 2048"


@pytest.mark.parametrize("soft", [-1, 65536])
def test_a_high_or_absent_limit_on_open_files_is_fine(soft):
    assert open_files(machine(open_files_soft=soft, open_files_hard=-1)).status == "ok"


@pytest.mark.parametrize(
    ("mode", "status"), [("always", "ok"), ("madvise", "ok"), ("never", "warn")]
)
def test_huge_pages_are_reported_when_they_are_off(mode, status):
    assert huge_pages(machine(huge_pages=mode)).status == status


def test_a_disk_is_described_with_its_measured_speed(tmp_path):
    check = disk(tmp_path)

    assert str(tmp_path) in check.what
    assert "probe" in check.what


def test_a_folder_that_cannot_be_written_is_bad(tmp_path):
    check = disk(tmp_path / "none")

    assert check.status == "bad"
    assert "cannot be written" in check.what


def test_free_cores_are_fine():
    assert quiet(load()).status == "ok"


def test_foreign_load_is_reported_with_its_share():
    check = quiet(load(foreign_share=0.4))

    assert check.status == "warn"
    assert "40 %" in check.what
