"""Counters of GPUs, sampled alongside a training: from the driver's library, in another process.

The training process is left alone: a thread of flatout's own process asks the driver some times a
second, and afterwards the samples are cut to the measured window. Both sides read CLOCK_MONOTONIC.
Whatever a device, a driver, a container or a lack of permission does not offer is missing with its
reason; nothing here raises because of a device.
"""

import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.hardware.load import process_tree
from flatout.records.messages import words
from flatout.records.readings import GpuReadings

if TYPE_CHECKING:
    from flatout.hardware.nvidia_counters import NvidiaCounters

SAMPLE_EVERY_S = 0.2
"""NVML renews its utilisation every 1/6 s to 1 s, depending on the product: more often tells
nothing new."""
SLOW_EVERY = 3
"""Each so many samples the costly readings are taken: PCIe traffic blocks for 20 ms a direction."""
LEAVE_S = 2.0
"""How long a call into the driver may still take at the end; a hung one is left behind."""
MAX_SERIES = 600
"""Points of the GPU-Util curve that are kept: two minutes."""
MEANS = (
    *("util_share", "sm_active_share", "tensor_active_share"),
    *("power_w", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"),
)
"""Readings that vary with the phase of a step: their mean over time is what they stand for."""
MEDIANS = ("power_limit_w", "clock_mhz", "max_clock_mhz", "temperature_c")
GREATEST = ("memory_used_bytes", "memory_total_bytes")
BUSY_SHARE = 0.05
"""Mean use of the multiprocessors over the window from which on another process disturbs. A desktop
that draws its windows, or a browser, takes a percent or two now and then; the same limit as for
others on the cores. Assumed: not measured on a GPU."""
DRIVER = threading.RLock()
"""Held while the driver is asked: on an H200 with driver 580 the process ended with SIGSEGV in
nvmlGpmSampleGet, twice, where three threads asked at the same time."""
LOOKS_BACK_S = {"util_share": (1 / 6, 1.0), "power_w": (1.0, 1.0)}
"""Least and most time over which NVML takes these means (nvml.h; power since Ampere): a sample
tells of what was before the window until then. The first one in 0.6 s of a busy H200 said 35 %,
the second 97 %."""
SINCE_LAST = ("sm_active_share", "tensor_active_share")
"""Means since the sample before, which for the first one in a window was outside of it."""
NO_SAMPLE, LOOKS_BACK = "counter.no_sample", "counter.looks_back"
"""What the messages are called that a window was too short for a reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """What one device said at one moment."""

    at_s: float
    """By `time.perf_counter`, which every process of this machine shares."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By the names of the fields of `GpuReadings`."""
    throttle: frozenset[str] = frozenset()
    pids: frozenset[int] | None = None
    """Processes that compute on the device; None where the driver does not tell."""
    busy_shares: Mapping[int, float] | None = None
    """How busy those that ran something since the sample before kept the multiprocessors, by
    process; None where the driver does not tell."""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Sources:
    """The devices that a process with a given environment would see."""

    found: "tuple[NvidiaCounters, ...]" = ()
    trouble: str = ""
    """Why there are none, in the library's own words."""

    def close(self) -> None:
        """Close all."""
        with DRIVER:
            for source in self.found:
                source.close()


def open_sources(environment: Mapping[str, str] | None = None) -> Sources:
    """Return the counters of the NVIDIA GPUs that a process with this environment would see."""
    from flatout.hardware.nvidia_counters import open_nvidia

    with DRIVER:
        return open_nvidia(os.environ if environment is None else environment)


def same_device(one: str, other: str) -> bool:
    """Return whether two UUIDs name one device; torch leaves the driver's prefix out.

    >>> same_device("GPU-5a1f", "5A1F"), same_device("GPU-5a1f", ""), same_device("", "")
    (True, False, False)
    """
    plain = [text.lower().removeprefix("gpu-").removeprefix("mig-") for text in (one, other)]
    return bool(plain[0]) and plain[0] == plain[1]


class CounterSampler:
    """Samples devices in a thread while something else runs: `with CounterSampler(sources):`."""

    def __init__(self, sources: Sources, *, every_s: float = SAMPLE_EVERY_S) -> None:
        self.sources = sources
        self.every_s = every_s
        self.samples: tuple[list[CounterSample], ...] = tuple([] for _ in sources.found)
        self.own_pids: set[int] = {os.getpid()}
        self.strangers: set[int] = set()
        """Processes on a device that are not below this one."""
        self.pids_before: tuple[frozenset[int], ...] = ()
        self.trouble = ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "CounterSampler":
        if self.sources.found:
            # What is on a device now, before the training starts, is certainly not the training.
            with DRIVER:
                first = [source.sample(is_full=True) for source in self.sources.found]
            self.pids_before = tuple(sample.pids or frozenset() for sample in first)
            self._thread = threading.Thread(target=self._run, name="gpu counters", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        if self._thread is None or not self._thread.is_alive():
            self.sources.close()

    def readings(self, uuid: str, began_s: float, ended_s: float) -> GpuReadings:
        """Return what the device showed between two moments."""
        place = self._place(uuid)
        if place is None:
            why = self.sources.trouble or words("counter.no_driver")
            if self.sources.found:
                why = words("counter.unlisted", uuid=uuid or words("counter.without_name"))
            return GpuReadings(missing={"all": why})
        window = [s for s in tuple(self.samples[place]) if began_s <= s.at_s <= ended_s]
        return readings_of(
            window,
            began_s=began_s,
            uuid=self.sources.found[place].uuid,
            own_pids=frozenset(self.own_pids),
            pids_before=self.pids_before[place] - self.own_pids,
            trouble=self.trouble,
        )

    def _place(self, uuid: str) -> int | None:
        found = self.sources.found
        matches = [i for i, source in enumerate(found) if same_device(source.uuid, uuid)]
        if matches:
            return matches[0]
        # A single visible device needs no name: CUDA can choose no other. A part of a GPU may go by
        # the name of the whole.
        is_nameless = not uuid or (bool(found) and found[0].uuid.startswith("MIG-"))
        return 0 if len(found) == 1 and self.pids_before and is_nameless else None

    def _run(self) -> None:
        number = 0
        while not self._over.wait(self.every_s):
            number += 1
            try:
                self._sample(is_full=number % SLOW_EVERY == 1)
            except Exception as error:  # noqa: BLE001  a driver that breaks ends the readings only
                self.trouble = f"{type(error).__name__}: {error}"
                return

    def _sample(self, *, is_full: bool) -> None:
        for place, source in enumerate(self.sources.found):
            with DRIVER:
                sample = source.sample(is_full=is_full)
            self.samples[place].append(sample)
            unknown = (sample.pids or frozenset()) - self.own_pids - self.pids_before[place]
            # Looking through the tree costs: not again for numbers that were not found in it.
            if unknown - self.strangers:
                self.own_pids.update(process_tree(os.getpid()))
                self.strangers |= unknown - self.own_pids


def readings_of(
    samples: Sequence[CounterSample],
    *,
    began_s: float | None = None,
    uuid: str = "",
    own_pids: frozenset[int] = frozenset(),
    pids_before: frozenset[int] = frozenset(),
    trouble: str = "",
) -> GpuReadings:
    """Return the readings over the samples of one window.

    Given when the window began, means over a time before it do not count.

    >>> twice = [CounterSample(at_s=t, values={"util_share": u}) for t, u in [(1, 0.5), (2, 1)]]
    >>> readings_of(twice).util_share
    0.75
    """
    if not samples:
        return GpuReadings(uuid=uuid, missing={"all": trouble or words(NO_SAMPLE)})
    values, missing = _values(samples, began_s)
    known = [sample for sample in samples if "throttle" not in sample.missing]
    names = sorted(set().union(*(sample.throttle for sample in known)))
    shares = {name: sum(name in s.throttle for s in known) / len(known) for name in names}
    others, idle, unknown = _other_processes(samples, own_pids, pids_before)
    if unknown:
        missing["other_processes"] = unknown
    if trouble:
        missing["later samples"] = trouble
    first_s = samples[0].at_s
    return GpuReadings(
        **values,
        throttle=tuple(names),
        throttle_shares=shares,
        other_processes=len(others),
        other_idle_processes=len(idle),
        uuid=uuid,
        samples=len(samples),
        series=tuple(
            (round(sample.at_s - first_s, 3), sample.values["util_share"])
            for sample in samples[:MAX_SERIES]
            if "util_share" in sample.values
        ),
        missing=missing,
    )


def _values(
    samples: Sequence[CounterSample], began_s: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the readings by field and why others are missing."""
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for names, over in ((MEANS, statistics.fmean), (MEDIANS, statistics.median), (GREATEST, max)):
        for name in names:
            inside = _inside(name, samples, began_s)
            seen = [sample.values[name] for sample in inside if name in sample.values]
            reason = _last_reason(name, samples)
            if seen:
                values[name] = int(over(seen)) if names is GREATEST else float(over(seen))
            if not seen:
                is_known = any(name in sample.values for sample in samples)
                missing[name] = words(LOOKS_BACK) if is_known else reason or words(NO_SAMPLE)
            elif reason:
                n, of = str(len(seen)), str(len(samples))
                missing[name] = words("counter.vanished", n=n, of=of, why=reason)
    throttle = _last_reason("throttle", samples)
    return values, missing | ({"throttle": throttle} if throttle else {})


def _inside(
    name: str, samples: Sequence[CounterSample], began_s: float | None
) -> Sequence[CounterSample]:
    """Return the samples whose reading is of the window alone."""
    if began_s is None:
        return samples
    if name in SINCE_LAST:
        return samples[1:]
    for back_s in reversed(LOOKS_BACK_S.get(name, (0.0,))):
        found = [sample for sample in samples if sample.at_s >= began_s + back_s]
        if found:
            return found
    return ()


def _last_reason(name: str, samples: Sequence[CounterSample]) -> str | None:
    return next((reason for s in reversed(samples) if (reason := s.missing.get(name))), None)


def _other_processes(
    samples: Sequence[CounterSample], own: frozenset[int], before: frozenset[int]
) -> tuple[frozenset[int], frozenset[int], str]:
    """Return other processes on the device, the idle ones among them, and why that is unknown."""
    told = [sample.pids for sample in samples if sample.pids is not None]
    if not told:
        reason = _last_reason("other_processes", samples)
        return frozenset(), frozenset(), reason or words("counter.no_processes")
    seen = frozenset().union(*told)
    others, why = seen - own, ""
    if seen and not seen & own and not all(Path(f"/proc/{pid}").exists() for pid in seen):
        # Numbers of another namespace: only those that were there before are surely not ours.
        others = seen & before
        why = words("counter.namespace")
    activity = [sample.busy_shares for sample in samples if sample.busy_shares is not None]
    idle = frozenset(
        pid
        for pid in others
        # A process that is not reported ran nothing.
        if activity and statistics.fmean(x.get(pid, 0.0) for x in activity) < BUSY_SHARE
    )
    return others, idle, why
