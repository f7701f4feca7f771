"""What is read beside a trial, from flatout's own process, and what it says about the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.readings import GpuReadings
from flatout.core.trial import Trial
from flatout.hardware.counters import CounterSampler, open_sources
from flatout.profiling.ranks import leading
from flatout.profiling.summary import window_in
from flatout.workflow import disturbance


def sampler(environment: Mapping[str, str]) -> CounterSampler:
    """Return a sampler for the devices that a child with this environment sees."""
    return CounterSampler(open_sources(environment))


def with_counters(
    trial: Trial,
    results: Sequence[Mapping[str, Any]],
    counters: CounterSampler,
    machine: Machine,
) -> Trial:
    """Return the trial with the device's counters on its profile, and with its disturbances."""
    result = leading(results)
    if trial.profile is None or result is None:
        return trial
    gpu = _readings(result, counters)
    load = trial.details.get("load", {})
    return trial.with_profile(_marked(trial.profile, gpu, load, machine))


def _marked(
    profile: Profile, gpu: GpuReadings | None, load: Mapping[str, float], machine: Machine
) -> Profile:
    return replace(
        profile,
        gpu=gpu,
        gpu_util_share=gpu.util_share if gpu else None,
        notes=(*profile.notes, *disturbance.notes_on(gpu)),
        invalid=(
            *profile.invalid,
            *disturbance.of_load(load, profile, machine),
            *disturbance.of_device(gpu),
        ),
    )


def _readings(result: Mapping[str, Any], counters: CounterSampler) -> GpuReadings | None:
    """Return the counters in the measured window; None where the training used no GPU."""
    device = result["device"]
    measured = window_in(result).measured
    if device["kind"] not in ("cuda", "rocm") or not measured:
        return None
    began_s = measured[0].end - measured[0].wall_s
    return counters.readings(device.get("uuid", ""), began_s, measured[-1].end)
