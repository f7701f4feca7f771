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

from flatout.hardware.counters import CounterSample, CounterSource, Sources
from flatout.hardware.gpus import memory_of
from flatout.records.messages import words

SM_ACTIVE, TENSOR_ACTIVE = 2, 5
"""NVML_GPM_METRIC_SM_UTIL and NVML_GPM_METRIC_ANY_TENSOR_UTIL, in percent, of nvml.h."""
METRICS = {SM_ACTIVE: "sm_active_share", TENSOR_ACTIVE: "tensor_active_share"}


class Gpm:
    """The activity of one GPU, or of an instance of it, between two calls of `read`.

    GPU performance monitoring (GPM) gives means between two of its own samples, without a
    profiler's replay and without slowing the kernels down.

    Args:
        nvml: The driver's library.
        handle: The whole GPU.
        take: Reads the counters into a sample: those of the GPU, or of an instance (MIG) alone.
    """

    def __init__(self, nvml: Any, handle: Any, take: Callable[[Any], object]) -> None:
        self.nvml = nvml
        self.handle = handle
        self.take = take
        self.samples: list[Any] = []
        self.is_primed = False
        self.trouble = self._start()

    def read(self, values: dict[str, float], missing: dict[str, str]) -> None:
        """Add the shares since the last call, or why there are none."""
        reason = self.trouble
        if not reason:
            try:
                self._advance(values, missing)
            except (self.nvml.NVMLError, AttributeError) as error:
                self.is_primed = False
                reason = str(error)
        if reason:
            missing.update(dict.fromkeys(METRICS.values(), reason))

    def close(self) -> None:
        """Free the driver's samples."""
        for sample in self.samples:
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlGpmSampleFree(sample)
        self.samples = []

    def _start(self) -> str:
        """Ask whether there is GPM and allocate; return why not."""
        nvml = self.nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                return words("counter.no_gpm")
            self.samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except (nvml.NVMLError, AttributeError) as error:
            return str(error) or words("counter.no_gpm")
        return ""

    def _advance(self, values: dict[str, float], missing: dict[str, str]) -> None:
        self.take(self.samples[1])
        if self.is_primed:
            self._add(values, missing)
        self.samples.reverse()
        self.is_primed = True

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
            answer = question.metrics[place]
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                missing[name] = words("counter.gpm_error", code=str(answer.nvmlReturn))
            elif not math.isfinite(answer.value):
                missing[name] = words("counter.gpm_no_number")
            else:
                values[name] = answer.value / 100


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
WHOLE_PERCENT = 100
KIB = 1024
"""NVML tells PCIe traffic in KiB/s."""


class NvidiaCounters:
    """One device. Every reading is tried each time: permissions and modes change under way."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        self.nvml = nvml
        self.handle = handle
        self.uuid = uuid
        self.is_instance = _answers(nvml, "nvmlDeviceIsMigDeviceHandle", handle)
        self.whole = handle
        """The GPU that a MIG instance is a part of: clocks and power belong to it."""
        if self.is_instance:
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                self.whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        self.has_instances = self.is_instance or _is_split(nvml, handle)
        self.gpm = Gpm(nvml, self.whole, self._take_activity)
        self.last_stamp = 0

    def sample(self, *, is_full: bool) -> CounterSample:
        """Read the counters now; PCIe traffic only where `is_full`."""
        values: dict[str, float] = {}
        missing: dict[str, str] = {}
        for read in (self._shares, self._memory, self._power, self._clocks, self._temperature):
            self._try(read, values, missing)
        if is_full:
            self._try(self._pcie, values, missing)
        self.gpm.read(values, missing)
        throttle: frozenset[str] = frozenset()
        with self._noting("throttle", missing):
            throttle = self._throttle()
        pids, busy_shares = self._processes(missing)
        return CounterSample(
            at_s=time.perf_counter(),
            values=values,
            throttle=throttle,
            pids=pids,
            busy_shares=busy_shares,
            missing=missing,
        )

    def close(self) -> None:
        """Give back the samples of GPM and this reader's hold of NVML."""
        self.gpm.close()
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()

    def _take_activity(self, sample: Any) -> None:
        """Read GPM's counters, those of a MIG instance for itself."""
        if self.is_instance:
            number = self.nvml.nvmlDeviceGetGpuInstanceId(self.handle)
            self.nvml.nvmlGpmMigSampleGet(self.whole, number, sample)
        else:
            self.nvml.nvmlGpmSampleGet(self.handle, sample)

    def _try(
        self,
        read: Callable[[], Mapping[str, Callable[[], float]]],
        values: dict[str, float],
        missing: dict[str, str],
    ) -> None:
        for name, ask in read().items():
            with self._noting(name, missing):
                values[name] = ask()

    @contextlib.contextmanager
    def _noting(self, name: str, missing: dict[str, str]) -> Iterator[None]:
        try:
            yield
        except (self.nvml.NVMLError, AttributeError) as error:
            missing[name] = self._reason(error)

    def _reason(self, error: Exception) -> str:
        text = str(error) or type(error).__name__
        return f"MIG: {text}" if self.has_instances else text

    def _shares(self) -> dict[str, Callable[[], float]]:
        return {
            "util_share": lambda: self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
        }

    def _memory(self) -> dict[str, Callable[[], float]]:
        return {
            "memory_used_bytes": lambda: memory_of(self.nvml, self.handle)[1],
            "memory_total_bytes": lambda: memory_of(self.nvml, self.handle)[0],
        }

    def _power(self) -> dict[str, Callable[[], float]]:
        nvml, whole = self.nvml, self.whole
        return {
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1e3,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1e3,
        }

    def _clocks(self) -> dict[str, Callable[[], float]]:
        nvml, whole = self.nvml, self.whole
        return {
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM),
            "max_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM),
        }

    def _temperature(self) -> dict[str, Callable[[], float]]:
        nvml, whole = self.nvml, self.whole
        return {
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)
        }

    def _pcie(self) -> dict[str, Callable[[], float]]:
        nvml, whole = self.nvml, self.whole

        def rate(counter: int) -> float:
            return KIB * float(nvml.nvmlDeviceGetPcieThroughput(whole, counter))

        return {
            "pcie_rx_bytes_per_s": lambda: rate(nvml.NVML_PCIE_UTIL_RX_BYTES),
            "pcie_tx_bytes_per_s": lambda: rate(nvml.NVML_PCIE_UTIL_TX_BYTES),
        }

    def _throttle(self) -> frozenset[str]:
        # Renamed in 2023; older bindings know the first name only, older drivers too.
        ask = getattr(
            self.nvml,
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            getattr(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons", None),
        )
        if ask is None:
            raise AttributeError(words("counter.no_reasons"))
        active = int(ask(self.whole))
        return frozenset(name for bit, name in THROTTLE_BITS.items() if active & bit)

    def _processes(
        self, missing: dict[str, str]
    ) -> tuple[frozenset[int] | None, Mapping[int, float] | None]:
        try:
            found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
            pids = frozenset(int(process.pid) for process in found)
        except (self.nvml.NVMLError, AttributeError) as error:
            missing["other_processes"] = self._reason(error)
            return None, None
        return pids, self._busy_processes()

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
        found = [item for item in found if item.smUtil <= WHOLE_PERCENT]
        self.last_stamp = max([self.last_stamp, *(int(item.timeStamp) for item in found)])
        told: dict[int, list[float]] = {}
        for item in found:
            told.setdefault(int(item.pid), []).append(item.smUtil / 100)
        return {pid: statistics.fmean(shares) for pid, shares in told.items()}


def open_nvidia(variables: Mapping[str, str]) -> Sources:
    """Return the NVIDIA devices that a process with these environment variables sees."""
    from flatout.hardware.gpus import read_driver

    try:
        import pynvml
    except ImportError:
        return Sources(trouble=read_driver().trouble)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Sources(trouble=str(error))
    try:
        named = [part.strip() for part in variables.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        instances = [name for name in named if name.startswith("MIG-")]
        if instances:
            handles = [(pynvml.nvmlDeviceGetHandleByUUID(name), name) for name in instances]
        else:
            handles = _visible_handles(pynvml, read_driver(), variables)
        # Before the shutdown below, which only counts down then: handles end with the library.
        return _opened(pynvml, handles)
    except pynvml.NVMLError as error:
        return Sources(trouble=str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _opened(nvml: Any, handles: list[tuple[Any, str]]) -> Sources:
    found: list[CounterSource] = []
    for handle, uuid in handles:
        try:
            nvml.nvmlInit()  # counted: each reader holds the library on its own
        except nvml.NVMLError as error:
            return Sources(found=tuple(found), trouble=str(error))
        found.append(NvidiaCounters(nvml, handle, uuid))
    return Sources(found=tuple(found), trouble="" if found else words("counter.no_gpu"))


def _visible_handles(nvml: Any, driver: Any, variables: Mapping[str, str]) -> list[tuple[Any, str]]:
    """Return the GPUs that the training may see, by the driver's numbers.

    CUDA numbers unlike GPUs by speed unless it is told not to: then all are opened, and the
    training says by its device's UUID which of them counts.
    """
    from flatout.hardware.gpus import visible

    gpus = tuple(gpu for gpu in driver.gpus if gpu.kind == "cuda")
    are_alike = len({gpu.name for gpu in gpus}) < 2
    chosen = visible(gpus, variables)
    if chosen and not are_alike and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        chosen = gpus
    return [(_handle(nvml, gpu), gpu.uuid) for gpu in chosen]


def _handle(nvml: Any, gpu: Any) -> Any:
    if gpu.uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    return nvml.nvmlDeviceGetHandleByIndex(gpu.index)


def _answers(nvml: Any, question: str, handle: Any) -> bool:
    try:
        return bool(getattr(nvml, question)(handle))
    except (nvml.NVMLError, AttributeError):
        return False


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except (nvml.NVMLError, AttributeError):
        return False
