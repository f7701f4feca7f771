from flatout.records.readings import GpuReadings
from flatout.rules.device.lowered_clocks import check
from tests.techniques.facts import machine, profile

HOT = {"hardware thermal slowdown": 0.5}


def at(clock_mhz, shares):
    readings = GpuReadings(clock_mhz=clock_mhz, max_clock_mhz=2000.0, throttle_shares=shares)
    return profile(gpu=readings)


def test_a_hot_gpu_is_reported_with_its_clock():
    finding = check(at(1500.0, HOT), machine())

    assert finding.share == 0.25
    assert "1500 of 2000 MHz" in finding.because


def test_it_is_silent_about_a_moment_a_power_cap_and_full_clocks():
    assert check(at(1500.0, {"hardware thermal slowdown": 0.05}), machine()) is None
    assert check(at(1500.0, {"power cap": 0.9}), machine()) is None
    assert check(at(2000.0, HOT), machine()) is None
    assert check(profile(), machine()) is None
