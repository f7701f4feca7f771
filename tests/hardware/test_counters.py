"""Counters against a driver that is not here: every failure it may have, one by one."""

import contextlib
import os
import sys
import time
from types import SimpleNamespace

import pynvml
import pytest

from flatout.hardware.counters import (
    CounterSample,
    CounterSampler,
    open_sources,
    readings_of,
)
from tests.hardware.test_gpus import Failure, fail_with
from tests.hardware.test_gpus import nvml as library


class NVMLError_NotFound(Failure):  # noqa: N801  the library's own name
    pass


class Question:
    """Stands for the structure of GPM's question."""

    def __init__(self):
        self.metrics = [SimpleNamespace() for _ in range(4)]


def answer(question):
    shares = {2: 61.0, 5: 12.5}
    for metric in question.metrics[: question.numMetrics]:
        metric.value, metric.nvmlReturn = shares[metric.metricId], 0


def nvml(**changes):
    """Return a driver with two GPUs of a kind that has everything."""
    parts = {
        "NVMLError_NotFound": NVMLError_NotFound,
        "NVML_SUCCESS": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_PCIE_UTIL_RX_BYTES": 1,
        "NVML_PCIE_UTIL_TX_BYTES": 0,
        "NVML_GPM_METRICS_GET_VERSION": 1,
        "c_nvmlGpmMetricsGet_t": Question,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=98),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetProcessUtilization": lambda handle, since: [],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetPowerUsage": lambda handle: 310_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1755,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetTemperature": lambda handle, kind: 61,
        "nvmlDeviceGetPcieThroughput": lambda handle, kind: 1000 + kind,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4,
        "nvmlDeviceIsMigDeviceHandle": lambda handle: 0,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: 0,
        "nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=1),
        "nvmlGpmSampleAlloc": lambda: object(),
        "nvmlGpmSampleFree": lambda sample: None,
        "nvmlGpmSampleGet": lambda handle, sample: sample,
        "nvmlGpmMigSampleGet": lambda handle, instance, sample: sample,
        "nvmlDeviceGetGpuInstanceId": lambda handle: 3,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 0,
        "nvmlGpmMetricsGet": answer,
    }
    return SimpleNamespace(**vars(library()) | parts | changes)


@pytest.fixture
def driver(monkeypatch):
    """Put a driver of these properties in place of the real library."""

    def use(**changes):
        monkeypatch.setitem(sys.modules, "pynvml", nvml(**changes))

    return use


def first_readings(variables=None, number=3):
    """Return what the first visible device tells over a few samples."""
    sources = open_sources({} if variables is None else variables)
    samples = [sources.found[0].sample(is_full=True) for _ in range(number)]
    sources.close()
    return readings_of(samples)


def test_every_counter_of_a_whole_gpu_is_read(driver):
    driver()

    found = first_readings()

    assert (found.util_share, found.sm_active_share, found.tensor_active_share) == (
        0.98,
        0.61,
        0.125,
    )
    assert (found.memory_used_bytes, found.memory_total_bytes) == (7, 100)
    assert (found.power_w, found.power_limit_w, found.temperature_c) == (310, 700, 61)
    assert (found.clock_mhz, found.max_clock_mhz) == (1755, 1980)
    assert (found.pcie_rx_bytes_per_s, found.pcie_tx_bytes_per_s) == (1001 * 1024, 1000 * 1024)
    assert (found.throttle, found.throttle_shares) == (("power cap",), {"power cap": 1.0})
    assert found.missing == {}


def test_the_names_that_are_used_exist_in_the_real_library():
    fake = nvml()

    assert [
        name for name in vars(fake) if "nvml" in name.lower() and not hasattr(pynvml, name)
    ] == []
    assert hasattr(pynvml.c_nvmlGpmMetricsGet_t(), "numMetrics")
    assert (pynvml.NVML_GPM_METRIC_SM_UTIL, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL) == (2, 5)


def test_a_machine_without_a_driver_gives_the_reason(driver):
    driver(nvmlInit=fail_with("NVML Shared Library Not Found"))

    with CounterSampler(open_sources({})) as sampler:
        pass

    assert sampler.readings("", 0.0, 1.0).missing == {"all": "NVML Shared Library Not Found"}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "util_share"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
        ("nvmlDeviceGetClockInfo", "clock_mhz"),
        ("nvmlDeviceGetMaxClockInfo", "max_clock_mhz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetPcieThroughput", "pcie_rx_bytes_per_s"),
        ("nvmlGpmQueryDeviceSupport", "sm_active_share"),
        ("nvmlGpmSampleGet", "tensor_active_share"),
        ("nvmlGpmMetricsGet", "sm_active_share"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "throttle"),
        ("nvmlDeviceGetComputeRunningProcesses", "other_processes"),
    ],
)
@pytest.mark.parametrize("reason", ["Insufficient Permissions", "Not Supported"])
def test_one_counter_that_fails_is_missing_with_its_reason_and_the_others_stay(
    driver, monkeypatch, call, field, reason
):
    driver()
    sources = open_sources({})
    monkeypatch.setattr(sys.modules["pynvml"], call, fail_with(reason))
    if call == "nvmlGpmQueryDeviceSupport":
        sources = open_sources({})  # asked once, when the device is opened

    found = readings_of([sources.found[0].sample(is_full=True) for _ in range(3)])

    assert found.missing[field] == reason
    assert sum(value is not None for value in (found.util_share, found.power_w)) >= 1


def test_bindings_that_lack_a_function_leave_its_reading_missing(driver, monkeypatch):
    driver()
    sources = open_sources({})
    monkeypatch.delattr(sys.modules["pynvml"], "nvmlDeviceGetPowerUsage")

    found = readings_of([sources.found[0].sample(is_full=True)])

    assert found.power_w is None
    assert "nvmlDeviceGetPowerUsage" in found.missing["power_w"]


def test_a_gpu_before_hopper_has_no_gpm(driver):
    driver(nvmlGpmQueryDeviceSupport=lambda handle: SimpleNamespace(isSupportedDevice=0))

    found = first_readings()

    assert found.sm_active_share is None
    assert "Hopper" in found.missing["tensor_active_share"]


def test_a_mig_instance_tells_its_own_memory_and_says_what_is_counted_for_the_whole_gpu(driver):
    driver(
        nvmlDeviceIsMigDeviceHandle=lambda handle: handle == "MIG-1",
        nvmlDeviceGetUtilizationRates=fail_with("Not Supported"),
        nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(
            total=40 if handle == "MIG-1" else 100, used=3, reserved=0
        ),
    )

    found = first_readings({"CUDA_VISIBLE_DEVICES": "MIG-1"})

    assert (found.memory_total_bytes, found.power_w) == (40, 310)
    assert found.missing["util_share"] == "MIG: Not Supported"
    assert found.sm_active_share == 0.61


def test_the_activity_of_a_mig_instance_is_asked_of_the_whole_gpu_by_its_number(driver):
    asked = []
    driver(
        nvmlDeviceIsMigDeviceHandle=lambda handle: handle == "MIG-1",
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: "whole",
        nvmlGpmMigSampleGet=lambda *told: asked.append(told[:2]),
        nvmlGpmSampleGet=fail_with("that would be the activity of others too"),
    )

    found = first_readings({"CUDA_VISIBLE_DEVICES": "MIG-1"})

    assert set(asked) == {("whole", 3)}
    assert found.tensor_active_share == 0.125


def test_activity_without_a_number_is_missing_and_no_reading(driver):
    def answer_nothing(question):
        for metric in question.metrics[: question.numMetrics]:
            metric.value, metric.nvmlReturn = float("nan"), 0

    driver(nvmlGpmMetricsGet=answer_nothing)

    found = first_readings()

    assert found.sm_active_share is None
    assert "too close" in found.missing["sm_active_share"]


def test_handles_are_asked_for_and_used_while_the_library_is_held(driver, monkeypatch):
    held = [0]

    def count(change):
        held[0] += change

    def first_gpu(index):
        assert held[0] > 0
        return index, held

    driver(nvmlInit=lambda: count(+1), nvmlShutdown=lambda: count(-1))
    lowest = []
    monkeypatch.setattr(
        sys.modules["pynvml"], "nvmlShutdown", lambda: (count(-1), lowest.append(held[0]))
    )
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetHandleByIndex", first_gpu)

    sources = open_sources({})
    opened_at = held[0]
    sources.close()

    assert opened_at == 2  # one hold for each reader
    assert lowest[1] > 0  # the first shutdown is the driver's reading, before any handle is kept
    assert held[0] == 0


def test_unlike_gpus_are_all_opened_and_the_trainings_own_is_chosen_by_its_name(driver):
    # CUDA's first device is the fastest; the driver's first one sits in the first slot.
    driver(
        nvmlDeviceGetName=lambda handle: "NVIDIA T4" if handle == 0 else "NVIDIA H200",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 if handle else 10),
    )
    began = time.perf_counter()

    with CounterSampler(open_sources({"CUDA_VISIBLE_DEVICES": "0"}), every_s=0.01) as sampler:
        time.sleep(0.2)
    found = sampler.readings("1abc", began, time.perf_counter())
    by_slot = open_sources({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).found

    assert found.util_share == pytest.approx(0.9)
    assert [source.uuid for source in by_slot] == ["GPU-0abc"]


def test_a_single_device_by_another_name_than_the_trainings_is_not_taken_for_it(driver):
    driver(nvmlDeviceGetCount=lambda: 1)

    with CounterSampler(open_sources({})) as sampler:
        pass

    assert "none that the driver lists" in sampler.readings("77ff", 0.0, 1.0).missing["all"]


def test_a_mig_instance_that_is_gone_gives_the_reason(driver):
    driver(nvmlDeviceGetHandleByUUID=fail_with("Not Found"))

    assert open_sources({"CUDA_VISIBLE_DEVICES": "MIG-1"}).trouble == "Not Found"


def test_a_counter_that_vanishes_midway_keeps_what_was_seen_and_says_so(driver, monkeypatch):
    driver()
    source = open_sources({}).found[0]
    before = [source.sample(is_full=True) for _ in range(2)]
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetPowerUsage", fail_with("GPU is lost"))

    found = readings_of([*before, source.sample(is_full=True)])

    assert found.power_w == 310
    assert found.missing["power_w"] == "vanished after 2 of 3 samples: GPU is lost"


def test_only_the_devices_that_the_training_sees_are_read(driver):
    driver()

    found = open_sources({"CUDA_VISIBLE_DEVICES": "1"}).found

    assert [source.uuid for source in found] == ["GPU-1abc"]


def test_a_training_that_may_see_no_gpu_has_no_counters(driver):
    driver()

    assert open_sources({"CUDA_VISIBLE_DEVICES": ""}).trouble == "the training may see no GPU"


def test_of_several_devices_the_one_that_the_training_named_counts(driver):
    driver(nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 if handle else 10))
    began = time.perf_counter()

    with CounterSampler(open_sources({}), every_s=0.01) as sampler:
        time.sleep(0.2)
    found = sampler.readings("1ABC", began, time.perf_counter())

    assert (found.uuid, found.util_share) == ("GPU-1abc", pytest.approx(0.9))
    assert found.samples == len(found.series) > 2


def test_a_device_that_nobody_named_is_not_guessed_among_several(driver):
    driver()

    with CounterSampler(open_sources({})) as sampler:
        pass

    assert "without a name" in sampler.readings("", 0.0, 1.0).missing["all"]


def test_nobody_running_anything_is_not_the_same_as_not_being_told(driver):
    def quiet(*_):
        raise NVMLError_NotFound("Not Found")

    driver(nvmlDeviceGetProcessUtilization=quiet)
    source = open_sources({}).found[0]

    assert source.sample(is_full=False).busy_shares == {}


def test_places_that_the_driver_left_unfilled_are_neither_use_nor_time(driver):
    asked = []

    def told(_handle, since):
        asked.append(since)
        rows = [(7, 5, 40), (3_722_305_536, 2**62, 2_147_483_632)]
        return [SimpleNamespace(pid=p, timeStamp=at, smUtil=share) for p, at, share in rows]

    driver(nvmlDeviceGetProcessUtilization=told)
    source = open_sources({}).found[0]

    found = source.sample(is_full=False).busy_shares
    source.sample(is_full=False)

    assert found == {7: pytest.approx(0.4)}
    assert asked == [0, 5]


def test_how_busy_each_process_kept_the_device_is_its_mean_since_the_last_question(driver):
    asked = []

    def told(_handle, since):
        asked.append(since)
        rows = [(7, 1, 40), (7, 2, 20), (8, 3, 1)]
        return [SimpleNamespace(pid=p, timeStamp=at, smUtil=share) for p, at, share in rows]

    driver(nvmlDeviceGetProcessUtilization=told)
    source = open_sources({}).found[0]

    found = source.sample(is_full=False).busy_shares
    source.sample(is_full=False)

    assert found == {7: pytest.approx(0.3), 8: pytest.approx(0.01)}
    assert asked == [0, 3]


def test_no_two_threads_are_inside_the_driver_at_once(driver):
    inside, seen = [], []

    def take(*_):
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.002)
        inside.pop()

    driver(nvmlGpmSampleGet=take, nvmlDeviceGetTemperature=take)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(CounterSampler(open_sources({}), every_s=0.001))
        time.sleep(0.1)

    assert len(seen) > 16
    assert max(seen) == 1


def test_processes_of_this_machine_are_others_though_the_training_is_not_among_them_yet():
    sample = CounterSample(at_s=1.0, pids=frozenset({os.getpid(), os.getppid()}))

    seen = readings_of([sample], own_pids=frozenset({2**22 - 1}))

    assert seen.other_processes == 2
    assert "other_processes" not in seen.missing
