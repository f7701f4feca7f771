"""The counters of one AMD GPU through AMD SMI, where its Python library is installed.

Every reading may be missing: virtual machines offer few, and keys came and went with versions of
the library. Not measured on a GPU yet.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flatout.hardware.counters import CounterSample, CounterSource, Sources
from flatout.records.messages import words

MIB = 1024**2
"""AMD SMI tells memory in MiB."""
UNREAD = (
    "sm_active_share",
    "tensor_active_share",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
)
"""AMD SMI has no counterpart, or only the sum of both directions."""
VIOLATIONS = {
    "active_ppt_pwr": "power cap",
    "active_socket_thrm": "hardware thermal slowdown",
    "active_hbm_thrm": "hardware thermal slowdown",
    "active_vr_thrm": "hardware thermal slowdown",
    "active_prochot_thrm": "hardware slowdown",
}
"""Keys of `amdsmi_get_violation_status`, in the words that NVIDIA's reasons have here."""


class AmdCounters:
    """One device. Every reading is tried each time."""

    def __init__(self, smi: Any, handle: Any, uuid: str, *, holds_library: bool) -> None:
        self.smi = smi
        self.handle = handle
        self.uuid = uuid
        self.holds_library = holds_library

    def sample(self, *, is_full: bool) -> CounterSample:
        """Read the counters now; the reasons for lower clocks only where `is_full`: they block."""
        values: dict[str, float] = {}
        missing: dict[str, str] = dict.fromkeys(UNREAD, words("counter.not_amd"))
        for name, ask in self._questions().items():
            with self._noting(name, missing):
                values[name] = _number(ask())
        throttle: frozenset[str] = frozenset()
        pids: frozenset[int] | None = None
        if is_full:
            with self._noting("throttle", missing):
                throttle = self._throttle()
        else:
            missing["throttle"] = ""  # not asked this time
        with self._noting("other_processes", missing):
            found = self.smi.amdsmi_get_gpu_process_list(self.handle)
            pids = frozenset(int(item["pid"]) for item in found)
        return CounterSample(
            at_s=time.perf_counter(), values=values, throttle=throttle, pids=pids, missing=missing
        )

    def close(self) -> None:
        """Leave the library; one reader does it for all, since it may not count its users."""
        if self.holds_library:
            self.holds_library = False
            with contextlib.suppress(self.smi.AmdSmiException):
                self.smi.amdsmi_shut_down()

    @contextlib.contextmanager
    def _noting(self, name: str, missing: dict[str, str]) -> Iterator[None]:
        failures = (self.smi.AmdSmiException, AttributeError, KeyError, TypeError, ValueError)
        try:
            yield
        except failures as error:
            missing[name] = _reason(error)

    def _questions(self) -> dict[str, Callable[[], Any]]:
        smi, handle = self.smi, self.handle
        return {
            "util_share": lambda: (
                _number(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]) / 100
            ),
            "memory_used_bytes": lambda: (
                _number(smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]) * MIB
            ),
            "memory_total_bytes": lambda: (
                _number(smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"]) * MIB
            ),
            "power_w": lambda: _power(smi.amdsmi_get_power_info(handle)),
            "power_limit_w": lambda: smi.amdsmi_get_power_info(handle)["power_limit"],
            "clock_mhz": lambda: self._clock()["clk"],
            "max_clock_mhz": lambda: self._clock()["max_clk"],
            "temperature_c": self._temperature,
        }

    def _clock(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.smi.amdsmi_get_clock_info(
            self.handle, self.smi.AmdSmiClkType.GFX
        )
        return found

    def _temperature(self) -> Any:
        kind = self.smi.AmdSmiTemperatureType.HOTSPOT
        current = self.smi.AmdSmiTemperatureMetric.CURRENT
        return self.smi.amdsmi_get_temp_metric(self.handle, kind, current)

    def _throttle(self) -> frozenset[str]:
        status = self.smi.amdsmi_get_violation_status(self.handle)
        return frozenset(name for key, name in VIOLATIONS.items() if status.get(key) in (True, 1))


def open_amd(variables: Mapping[str, str]) -> Sources:
    """Return the AMD devices that a process with these environment variables sees."""
    try:
        import amdsmi
    except (ImportError, KeyError, OSError) as error:  # it loads the driver's library on import
        return Sources(trouble=str(error))
    from flatout.hardware.gpus import Gpu, visible

    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
        gpus = [
            Gpu(
                index=index,
                kind="rocm",
                name="",
                uuid=str(amdsmi.amdsmi_get_gpu_device_uuid(handle)),
            )
            for index, handle in enumerate(handles)
        ]
    except amdsmi.AmdSmiException as error:
        return Sources(trouble=str(error))
    found: tuple[CounterSource, ...] = tuple(
        AmdCounters(amdsmi, handles[gpu.index], gpu.uuid, holds_library=place == 0)
        for place, gpu in enumerate(visible(gpus, variables))
    )
    return Sources(found=found, trouble="" if found else words("counter.no_gpu"))


def _number(value: Any) -> float:
    """Return a number; where there is none, the library gives the text N/A.

    >>> _number(71)
    71.0
    """
    return float(value)


def _power(info: Mapping[str, Any]) -> float:
    """Return watts: of the two keys newer products fill the first, older ones the second."""
    try:
        return _number(info["current_socket_power"])
    except (KeyError, TypeError, ValueError):
        return _number(info["average_socket_power"])


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return words("counter.amd_no_key", key=str(error.args[0]))
    return words("counter.amd_nothing") if isinstance(error, ValueError) else str(error)
