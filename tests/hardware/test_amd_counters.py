import sys
from types import SimpleNamespace

import pytest

from flatout.hardware.amd_counters import open_amd
from flatout.hardware.counters import readings_of


class Failure(Exception):  # noqa: N818  stands for AmdSmiException and NVMLError
    pass


def fail_with(text):
    def raise_it(*_):
        raise Failure(text)

    return raise_it


def amdsmi(**changes):
    """Return AMD's library with one GPU."""
    parts = {
        "AmdSmiException": Failure,
        "AmdSmiClkType": SimpleNamespace(GFX=0),
        "AmdSmiTemperatureType": SimpleNamespace(HOTSPOT=1),
        "AmdSmiTemperatureMetric": SimpleNamespace(CURRENT=0),
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["handle"],
        "amdsmi_get_gpu_driver_info": lambda handle: {"driver_version": "6.12"},
        "amdsmi_get_gpu_asic_info": lambda handle: {"market_name": "AMD Instinct MI300X"},
        "amdsmi_get_gpu_device_uuid": lambda handle: "abc",
        "amdsmi_get_gpu_activity": lambda handle: {"gfx_activity": 97},
        "amdsmi_get_gpu_vram_usage": lambda handle: {"vram_total": 2048, "vram_used": 16},
        "amdsmi_get_power_info": lambda handle: {
            "current_socket_power": 500,
            "average_socket_power": "N/A",
            "power_limit": 750,
        },
        "amdsmi_get_clock_info": lambda handle, kind: {"clk": 2000, "max_clk": 2100},
        "amdsmi_get_temp_metric": lambda handle, kind, metric: 66,
        "amdsmi_get_violation_status": lambda handle: {"active_socket_thrm": True},
        "amdsmi_get_gpu_process_list": lambda handle: [{"pid": 7}],
    }
    return SimpleNamespace(**parts | changes)


def readings(monkeypatch, **changes):
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi(**changes))
    sources = open_amd({})
    found = readings_of([source.sample(is_full=True) for source in sources.found])
    sources.close()
    return found


def refuse(*_):
    raise Failure("AMDSMI_STATUS_NO_PERM")


def test_the_counters_of_an_amd_gpu_are_read(monkeypatch):
    found = readings(monkeypatch)

    assert (found.util_share, found.power_w, found.power_limit_w) == (0.97, 500, 750)
    assert (found.memory_used_bytes, found.temperature_c) == (16 * 1024**2, 66)
    assert (found.clock_mhz, found.max_clock_mhz) == (2000, 2100)
    assert found.throttle == ("hardware thermal slowdown",)
    assert found.sm_active_share is None


def test_older_products_tell_the_average_power_only(monkeypatch):
    old = {"current_socket_power": "N/A", "average_socket_power": 300, "power_limit": "N/A"}

    found = readings(monkeypatch, amdsmi_get_power_info=lambda handle: old)

    assert (found.power_w, found.power_limit_w) == (300, None)
    assert found.missing["power_limit_w"] == "AMD SMI answers N/A"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("amdsmi_get_gpu_activity", "util_share"),
        ("amdsmi_get_gpu_vram_usage", "memory_used_bytes"),
        ("amdsmi_get_clock_info", "clock_mhz"),
        ("amdsmi_get_temp_metric", "temperature_c"),
        ("amdsmi_get_violation_status", "throttle"),
        ("amdsmi_get_gpu_process_list", "other_processes"),
    ],
)
def test_a_refused_counter_is_missing_with_its_reason(monkeypatch, call, field):
    found = readings(monkeypatch, **{call: refuse})

    assert found.missing[field] == "AMDSMI_STATUS_NO_PERM"


def test_a_library_without_its_driver_gives_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi(amdsmi_init=refuse))

    assert open_amd({}).trouble == "AMDSMI_STATUS_NO_PERM"


def test_a_machine_without_the_library_gives_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)

    assert "amdsmi" in open_amd({}).trouble
