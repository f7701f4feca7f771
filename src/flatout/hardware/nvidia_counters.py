"""The counters of one NVIDIA GPU, or of a MIG instance of it, through NVML. Never raises for one.

What NVML calls utilisation is the share of time in which at least one kernel ran: one thread on one
core of the GPU makes it 100 %. What multiprocessors and tensor cores do comes from GPM (`Gpm`), on
Hopper and later.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flatout.hardware.counters import CounterSample, Sources
from flatout.hardware.gpus import answer, memory_of, read_driver, visible
from flatout.records.messages import words
from flatout.records.units import KIB

SM_ACTIVE, TENSOR_ACTIVE = 2, 5
"""NVML_GPM_METRIC_SM_UTIL and NVML_GPM_METRIC_ANY_TENSOR_UTIL, in percent, of nvml.h."""
METRICS = {SM_ACTIVE: "sm_active_share", TENSOR_ACTIVE: "tensor_active_share"}


class Gpm:
    """The activity of one GPU, or of an instance of it, between two calls of `read`.

    GPU performance monitoring (GPM) gives means between two of its own samples, without a
    profiler's replay and without slowing the kernels down.

    The handle is that of the whole GPU; `take` reads the counters of it, or of an instance (MIG)
    alone, into a sample.
    """

    def __init__(self, nvml: Any, handle: Any, take: Callable[[Any], object]) -> None:
        self.nvml = nvml
        self.take = take
        self.samples: list[Any] = []
        self.is_primed = False
        self.trouble = ""
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self.samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            else:
                self.trouble = words("counter.no_gpm")
        except (nvml.NVMLError, AttributeError) as error:
            self.trouble = str(error) or words("counter.no_gpm")

    def read(self, values: dict[str, float], missing: dict[str, str]) -> None:
        """Add the shares since the last call, or why there are none."""
        reason = self.trouble
        if not reason:
            try:
                self.take(self.samples[1])
                if self.is_primed:
                    self._add(values, missing)
                self.samples.reverse()
                self.is_primed = True
            except (self.nvml.NVMLError, AttributeError) as error:
                self.is_primed = False
                reason = str(error)
        if reason:
            missing.update(dict.fromkeys(METRICS.values(), reason))

    def close(self) -> None:
        """Free the driver's samples."""
        for sample in self.samples:
            answer(self.nvml, "nvmlGpmSampleFree", sample)
        self.samples = []

    def _add(self, values: dict[str, float], missing: dict[str, str]) -> None:
        nvml = self.nvml
        question = nvml.c_nvmlGpmMetricsGet_t()
        question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)
        question.sample1, question.sample2 = self.samples
        for place, number in enumerate(METRICS):
            question.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(question)
        for place, name in enumerate(METRICS.values()):
            metric = question.metrics[place]
            if metric.nvmlReturn != nvml.NVML_SUCCESS:
                missing[name] = words("counter.gpm_error", code=str(metric.nvmlReturn))
            elif not math.isfinite(metric.value):
                missing[name] = words("counter.gpm_no_number")
            else:
                values[name] = metric.value / 100


THROTTLE_BITS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock",
}
"""nvmlClocksEventReasons of nvml.h. Idle (0x1) is left out: it slows down no one's work."""


class NvidiaCounters:
    """One device. Every reading is tried each time: permissions and modes change under way."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        self.nvml = nvml
        self.handle = handle
        self.uuid = uuid
        self.is_instance = bool(answer(nvml, "nvmlDeviceIsMigDeviceHandle", handle))
        self.whole = handle
        """The GPU that a MIG instance is a part of: clocks and power belong to it."""
        if self.is_instance:
            whole = answer(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            self.whole = handle if whole is None else whole
        is_split, _pending = answer(nvml, "nvmlDeviceGetMigMode", handle) or (False, False)
        self.has_instances = self.is_instance or bool(is_split)
        self.gpm = Gpm(nvml, self.whole, self._take_activity)
        self.last_stamp = 0

    def sample(self, *, is_full: bool) -> CounterSample:
        """Read the counters now; PCIe traffic only where `is_full`."""
        values: dict[str, float] = {}
        missing: dict[str, str] = {}
        for name, ask in self._questions(is_full=is_full).items():
            with self._noting(name, missing):
                values[name] = ask()
        self.gpm.read(values, missing)
        throttle: frozenset[str] = frozenset()
        with self._noting("throttle", missing):
            active = int(self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.whole))
            throttle = frozenset(name for bit, name in THROTTLE_BITS.items() if active & bit)
        pids: frozenset[int] | None = None
        with self._noting("other_processes", missing):
            found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
            pids = frozenset(int(process.pid) for process in found)
        return CounterSample(
            at_s=time.perf_counter(),
            values=values,
            throttle=throttle,
            pids=pids,
            busy_shares=None if pids is None else self._busy_processes(),
            missing=missing,
        )

    def close(self) -> None:
        """Give back the samples of GPM and this reader's hold of NVML."""
        self.gpm.close()
        answer(self.nvml, "nvmlShutdown")

    def _take_activity(self, sample: Any) -> None:
        """Read GPM's counters, those of a MIG instance for itself."""
        if self.is_instance:
            number = self.nvml.nvmlDeviceGetGpuInstanceId(self.handle)
            self.nvml.nvmlGpmMigSampleGet(self.whole, number, sample)
        else:
            self.nvml.nvmlGpmSampleGet(self.handle, sample)

    @contextlib.contextmanager
    def _noting(self, name: str, missing: dict[str, str]) -> Iterator[None]:
        try:
            yield
        except (self.nvml.NVMLError, AttributeError) as error:
            text = str(error) or type(error).__name__
            missing[name] = f"MIG: {text}" if self.has_instances else text

    def _questions(self, *, is_full: bool) -> dict[str, Callable[[], float]]:
        nvml, handle, whole = self.nvml, self.handle, self.whole

        def pcie(counter: int) -> float:
            return KIB * float(nvml.nvmlDeviceGetPcieThroughput(whole, counter))  # from KiB/s

        often: dict[str, Callable[[], float]] = {
            "util_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_used_bytes": lambda: memory_of(nvml, handle)[1],
            "memory_total_bytes": lambda: memory_of(nvml, handle)[0],
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1e3,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1e3,
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM),
            "max_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                whole, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        seldom: dict[str, Callable[[], float]] = {
            "pcie_rx_bytes_per_s": lambda: pcie(nvml.NVML_PCIE_UTIL_RX_BYTES),
            "pcie_tx_bytes_per_s": lambda: pcie(nvml.NVML_PCIE_UTIL_TX_BYTES),
        }
        return often | seldom if is_full else often

    def _busy_processes(self) -> Mapping[int, float] | None:
        """Return how busy each process kept the multiprocessors since this was asked last.

        None where the driver does not say.
        """
        try:
            found = self.nvml.nvmlDeviceGetProcessUtilization(self.handle, self.last_stamp)
        except (self.nvml.NVMLError, AttributeError) as error:
            # "Not found" is the answer when no one ran anything since the last question.
            is_quiet = type(error).__name__ == "NVMLError_NotFound"
            return {} if is_quiet else None
        # Drivers add places that no one filled, with shares and stamps of any size.
        found = [item for item in found if item.smUtil <= 100]
        self.last_stamp = max([self.last_stamp, *(int(item.timeStamp) for item in found)])
        told: dict[int, list[float]] = {}
        for item in found:
            told.setdefault(int(item.pid), []).append(item.smUtil / 100)
        return {pid: statistics.fmean(shares) for pid, shares in told.items()}


def open_nvidia(variables: Mapping[str, str]) -> Sources:
    """Return the counters of the GPUs that a process with these variables sees, or why none."""
    try:
        import pynvml
    except ImportError:
        return Sources(trouble=words("counter.no_bindings"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Sources(trouble=str(error))
    found: list[NvidiaCounters] = []
    try:
        for handle, uuid in _handles(pynvml, variables):
            pynvml.nvmlInit()  # counted: each reader holds the library on its own
            found.append(NvidiaCounters(pynvml, handle, uuid))
    except pynvml.NVMLError as error:
        return Sources(found=tuple(found), trouble=str(error))
    finally:
        answer(pynvml, "nvmlShutdown")  # only counts down: handles end with the library
    return Sources(found=tuple(found), trouble="" if found else words("counter.no_gpu"))


def _handles(nvml: Any, variables: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Return the GPUs that the training may see, by the driver's numbers.

    CUDA numbers unlike GPUs by speed unless it is told not to: then all are opened, and the
    training says by its device's UUID which of them counts.
    """
    named = [part.strip() for part in variables.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if instances := [name for name in named if name.startswith("MIG-")]:
        return [(nvml.nvmlDeviceGetHandleByUUID(name), name) for name in instances]
    gpus = read_driver().gpus
    are_alike = len({gpu.name for gpu in gpus}) < 2
    chosen = visible(gpus, variables)
    if chosen and not are_alike and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        chosen = gpus
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [
        (by_uuid(gpu.uuid) if gpu.uuid.startswith("MIG-") else by_index(gpu.index), gpu.uuid)
        for gpu in chosen
    ]
