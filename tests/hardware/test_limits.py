import os

import pytest

from flatout.hardware.limits import (
    affinity,
    cgroup_folders,
    host_memory_bytes,
    memory_limit_bytes,
    memory_shortage,
    quota_cores,
    shm_bytes,
    swap_bytes,
    usable_cores,
)

MOUNT_V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
MOUNTS_V1 = (
    "31 23 0:28 {top} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:29 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)
MEMINFO = "MemTotal:       1000000 kB\nSwapTotal:   2000 kB\nSwapFree:  500 kB\n"


def host(root, *, cgroup, mounts, files):
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("25 1 8:1 / / rw - ext4 /dev/root rw\n" + mounts)
    (root / "proc/meminfo").write_text(MEMINFO)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_quota_of_version_2_is_read(tmp_path):
    root = host(
        tmp_path,
        cgroup="0::/job\n",
        mounts=MOUNT_V2.format(top="/"),
        files={"job/cpu.max": "250000 100000"},
    )

    assert quota_cores(root) == 2.5


def test_a_quota_of_version_1_is_read(tmp_path):
    root = host(
        tmp_path,
        cgroup="3:cpu,cpuacct:/job\n2:memory:/job\n",
        mounts=MOUNTS_V1.format(top="/"),
        files={"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"},
    )

    assert quota_cores(root) == 1.5


@pytest.mark.parametrize(("present_kb", "kb"), [(8_000_000, 8_000_000), (1_020_000, 1_000_000)])
def test_what_a_balloon_holds_for_now_is_memory_too(tmp_path, present_kb, kb):
    pages = present_kb * 1024 // os.sysconf("SC_PAGE_SIZE")
    root = host(tmp_path, cgroup="", mounts="", files={})
    zone = "Node 0, zone Normal\n  pages free  9\n        present  {}\n        managed  5\n"
    (root / "proc/zoneinfo").write_text(zone.format(1000) + zone.format(pages - 1000))

    assert host_memory_bytes(root) == kb * 1024


def test_the_tightest_quota_up_the_tree_counts(tmp_path):
    root = host(
        tmp_path,
        cgroup="0::/pod/container/job\n",
        mounts=MOUNT_V2.format(top="/"),
        files={
            "pod/cpu.max": "100000 100000",
            "pod/container/cpu.max": "max 100000",
            "pod/container/job/cpu.max": "400000 100000",
        },
    )

    assert quota_cores(root) == 1.0


def test_no_quota_is_no_number(tmp_path):
    root = host(
        tmp_path,
        cgroup="3:cpu,cpuacct:/job\n0::/job\n",
        mounts=MOUNTS_V1.format(top="/") + MOUNT_V2.format(top="/"),
        files={
            "cpu/job/cpu.cfs_quota_us": "-1",
            "cpu/job/cpu.cfs_period_us": "100000",
            "job/cpu.max": "max 100000",
        },
    )

    assert quota_cores(root) is None


def test_a_container_sees_its_own_group_as_the_mounted_top(tmp_path):
    root = host(
        tmp_path,
        cgroup="0::/docker/abc\n",
        mounts=MOUNT_V2.format(top="/docker/abc"),
        files={"cpu.max": "200000 100000"},
    )

    assert quota_cores(root) == 2.0


@pytest.mark.parametrize("path", ["/../../other", "/kubepods/pod1"])
def test_a_group_outside_the_mounted_part_falls_back_to_its_top(tmp_path, path):
    root = host(
        tmp_path,
        cgroup=f"0::{path}\n",
        mounts=MOUNT_V2.format(top="/docker/abc"),
        files={"cpu.max": "300000 100000"},
    )

    assert cgroup_folders("cpu", root) == (root / "sys/fs/cgroup",)
    assert quota_cores(root) == 3.0


def test_the_tightest_memory_limit_counts_and_the_unlimited_number_does_not(tmp_path):
    root = host(
        tmp_path,
        cgroup="2:memory:/a/b\n",
        mounts=MOUNTS_V1.format(top="/"),
        files={
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/a/memory.limit_in_bytes": "500000000",
            "memory/a/b/memory.limit_in_bytes": "700000000",
        },
    )

    assert memory_limit_bytes(root) == 500_000_000


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files"),
    [
        (
            "0::/a/b\n",
            MOUNT_V2.format(top="/"),
            {
                "a/b/memory.events": "low 0\nhigh 0\nmax 913\noom 4\noom_kill 3\noom_group_kill 0",
                "a/memory.events": "oom_kill 2",
                "a/b/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=1000",
            },
        ),
        (
            "2:memory:/a\n",
            MOUNTS_V1.format(top="/"),
            {
                "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
                "memory/a/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000",
            },
        ),
    ],
)
def test_kills_for_memory_and_waits_for_it_are_those_the_kernel_counted(
    tmp_path, cgroup, mounts, files
):
    root = host(tmp_path, cgroup=cgroup, mounts=mounts, files=files)

    assert memory_shortage(root) == (3, 2.5)


def test_where_the_kernel_counts_nothing_nothing_was_short(tmp_path):
    root = host(tmp_path, cgroup="0::/\n", mounts=MOUNT_V2.format(top="/"), files={})

    assert memory_shortage(root) == (0, 0.0)


def test_without_a_memory_limit_there_is_none(tmp_path):
    root = host(
        tmp_path, cgroup="0::/a\n", mounts=MOUNT_V2.format(top="/"), files={"a/memory.max": "max"}
    )

    assert memory_limit_bytes(root) is None
    assert host_memory_bytes(root) == 1_000_000 * 1024


def test_swap_in_use_is_the_size_less_what_is_free(tmp_path):
    root = host(tmp_path, cgroup="", mounts="", files={})

    assert swap_bytes(root) == (2000 * 1024, 1500 * 1024)


def test_a_fraction_of_a_core_still_counts_as_one(tmp_path):
    root = host(
        tmp_path,
        cgroup="0::/job\n",
        mounts=MOUNT_V2.format(top="/"),
        files={"job/cpu.max": "50000 100000"},
    )

    assert usable_cores(root) == 1


def test_usable_cores_of_this_host_stay_within_its_affinity():
    assert 1 <= usable_cores() <= len(affinity()) <= (os.cpu_count() or 1)


def test_this_host_has_memory():
    assert host_memory_bytes() > 2**28


def test_a_missing_shared_memory_mount_has_no_bytes(tmp_path):
    assert shm_bytes(tmp_path / "none") == (0, 0)


def test_free_shared_memory_fits_into_its_mount():
    size, free = shm_bytes()

    assert 0 <= free <= size
