import os
import time

import psutil
import pytest

from flatout.hardware.system import HostMeter


def test_the_host_tells_its_cores_its_memory_and_its_load():
    meter = HostMeter()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass

    found = meter.read()

    assert found.cores == os.cpu_count()
    assert 0 < found.cpu_share <= 1
    assert 0 < found.memory_used_bytes < found.memory_total_bytes


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("cpu_percent", "cpu_share"),
        ("virtual_memory", "memory_used_bytes"),
        ("disk_io_counters", "disk_read_bytes_per_s"),
    ],
)
def test_what_a_container_hides_is_missing_with_its_reason(monkeypatch, call, field):
    def refuse(*_, **__):
        raise PermissionError("no access to /proc")

    monkeypatch.setattr(psutil, call, refuse)

    found = HostMeter().read()

    assert getattr(found, field) is None
    assert found.missing[field] == "no access to /proc"


def test_a_system_without_disks_says_so(monkeypatch):
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)

    assert HostMeter().read().missing["disk_read_bytes_per_s"] == "the system lists no disk"
