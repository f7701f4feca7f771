from flatout.records.readings import GpuReadings
from flatout.rules.device.shared_gpu import check
from tests.techniques.facts import machine, profile


def test_processes_that_computed_are_counted():
    known = profile(gpu=GpuReadings(other_processes=3, other_idle_processes=1))

    finding = check(known, machine())

    assert finding.because.endswith("2")
    assert finding.is_bound


def test_it_is_silent_about_idle_processes_and_where_nothing_was_read():
    idle = profile(gpu=GpuReadings(other_processes=1, other_idle_processes=1))

    assert check(idle, machine()) is None
    assert check(profile(), machine()) is None
