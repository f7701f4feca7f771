from dataclasses import replace

from flatout.records.readings import GpuReadings
from flatout.reporting.profile.gpu import gpu_lines

FULL = GpuReadings(
    util_share=0.98,
    sm_active_share=0.43,
    tensor_active_share=0.12,
    memory_used_bytes=40 * 1024**3,
    memory_total_bytes=141 * 1024**3,
    power_w=310.2,
    power_limit_w=700.0,
    clock_mhz=1755.0,
    max_clock_mhz=1980.0,
    temperature_c=61.0,
    throttle=("power cap",),
    throttle_shares={"power cap": 0.25},
    pcie_rx_bytes_per_s=2.5 * 1024**3,
    pcie_tx_bytes_per_s=1024.0**2,
    samples=40,
)


def test_the_shares_that_are_taken_for_one_another_stand_side_by_side(busy):
    lines = gpu_lines(replace(busy, gpu=FULL, device_busy_share=0.61), 200)

    assert lines == [
        "GPU shares   GPU-Util 98 %, device busy 61 %, SM active 43 %, tensor active 12 % "
        "(40 samples)",
        "GPU state    40.00 GiB of 141.00 GiB, 310 W of 700 W, 1755 MHz of 1980 MHz, 61 C, "
        "PCIe in 2.50 GiB/s, PCIe out 1.0 MiB/s",
        "GPU clocks   lowered in some samples: power cap (25 %)",
    ]


def test_what_could_not_be_read_is_named_with_its_reason(busy):
    reason = "Insufficient Permissions"
    gpu = GpuReadings(
        util_share=0.5,
        samples=3,
        missing={"sm_active_share": reason, "tensor_active_share": reason, "power_limit_w": "x"},
    )

    assert gpu_lines(replace(busy, gpu=gpu), 100)[-1] == (
        "not known    SM active, tensor active: Insufficient Permissions"
    )


def test_without_a_gpu_there_is_no_section(starved):
    assert gpu_lines(starved, 80) == []
