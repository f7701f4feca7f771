"""What a step could gain at most, by runs in which one cause costs nothing.

The script as it is, the same with its first batches replayed, on a device with replayed batches
that are there already, and once more as it is: side by side, because a machine drifts. Then its
operations are counted, its loader is drained alone, and the hardware's own peaks are measured.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.analysis.feeding import workers_now
from flatout.analysis.journey import pipeline_of
from flatout.analysis.regime import held_to_phases, loaders_per_s, main_dtype
from flatout.analysis.steps import medians_by_step
from flatout.hardware.peaks import Peaks, PeaksOf, forget_peaks, read_peaks
from flatout.launch.trial_process import scratch_root
from flatout.records import catalogue
from flatout.records.messages import words, written
from flatout.records.profile import Ceilings, Profile, most_times
from flatout.records.readings import Limits
from flatout.records.units import format_share
from flatout.tuning.passes import PassRunner, find_seen, with_note

DRIFT = 0.10
"""When the two runs as they are differ by more, their reader should know."""
MOST_DRIFT = 0.50
"""When they differ by more than this, the machine was too busy and nothing was measured."""
MOST_REPEATS = 2
"""Of the runs of one kind that other work disturbed."""
LIMIT_STEPS = 4
"""Steps of the pass that counts operations: the recorder looks after the fourth."""
COMPUTE = ("forward", "backward", "optimizer")


def num_runs(profile: Profile) -> int:
    """Return how often the script is run: twice as it is, with each replay, and for the limits."""
    replays = 1 if profile.device_kind == "cpu" else 2
    return 3 + replays if profile.training_loaders else 1


def add(profile: Profile, runner: PassRunner) -> Profile:
    """Return the profile with measured ceilings, the limits of the machine, and the MFU."""
    return with_limits(with_ceilings(profile, runner), runner)


@dataclass(slots=True)
class _Side:
    """The passes of one kind."""

    name: str
    probes: Mapping[str, Mapping[str, Any]]
    steps_ms: list[float] = field(default_factory=list)
    profile: Profile | None = None
    trouble: str = ""
    disturbed: str = ""
    """How other work spoilt one of its runs, also when it was repeated."""
    repeats: int = 0

    def run(self, runner: PassRunner) -> None:
        """Run the script, again where other work spoilt that; without a number say why."""
        profile = self._ran(runner)
        while profile and profile.invalid and self.repeats < MOST_REPEATS:
            if runner.left_s < runner.last_wall_s:
                break
            self.repeats += 1
            profile = self._ran(runner)
        if profile is not None:
            self.profile = profile
            self.disturbed = self.disturbed or "; ".join(map(written, profile.invalid))
            self.steps_ms.append(profile.whole_step_ms)

    def _ran(self, runner: PassRunner) -> Profile | None:
        trial = runner.run(words(f"progress.{self.name}"), self.probes)
        seen = find_seen(trial, "replay") if self.probes else {"replayed": 1}
        if trial.profile is None:
            self.trouble = trial.message
        elif not seen:
            self.trouble = words("note.replay_failed", errors="; ".join(trial.details["errors"]))
        elif not seen["replayed"]:
            self.trouble = words("note.not_replayed")
        return None if self.trouble else trial.profile


def with_ceilings(profile: Profile, runner: PassRunner) -> Profile:
    """Return the profile with ceilings from replays between two runs of the script as it is."""
    if not profile.training_loaders:
        return with_note(profile, words("note.mean_passes"))
    plain = _Side("plain", {})
    host = _Side("replayed", replay_probe(profile, "host"))
    device = _Side("on_device", replay_probe(profile, "device"))
    sides = [plain, host, *([device] if profile.device_kind != "cpu" else []), plain]
    for side in sides:
        what = words(f"progress.{side.name}")
        if runner.left_s < runner.last_wall_s:
            profile = with_note(profile, words("note.no_time_steps", what=what))
            break
        side.run(runner)
        if side.trouble:
            profile = with_note(profile, words("note.side_failed", what=what, why=side.trouble))
            break
    if not plain.steps_ms or host.profile is None:
        return with_note(profile, words("note.derived"))
    why = plain.disturbed or host.disturbed or device.disturbed
    if why:
        return with_note(profile, words("note.ceilings_disturbed", why=why))
    plain_ms = statistics.geometric_mean(plain.steps_ms)
    measured = ceilings_of(plain_ms, host.profile, device.profile or host.profile)
    measured = replace(measured, slowed_share=slowed_share(profile, host.profile))
    if contradicts(profile, measured):
        share = format_share(profile.share("data_wait"))
        return with_note(profile, words("note.ceilings_contradict", share=share))
    return _with_drift(profile, held_to_phases(profile, measured), plain.steps_ms)


def contradicts(profile: Profile, measured: Ceilings) -> bool:
    """Return whether free data brought less than the wait that they take away.

    On the CPU nothing else goes on while the loop waits: only a disturbed run shows that. A device
    may have had work in its queue meanwhile, and then it is true.
    """
    waits = most_times(profile.share("data_wait"))
    return profile.device_kind == "cpu" and (1 + DRIFT) * measured.free_data < waits


def ceilings_of(plain_ms: float, host: Profile, device: Profile) -> Ceilings:
    """Return the ceilings from the step as it is and the profiles of the replays.

    `device` has its batches on the training device; on the CPU it is the same run.
    """
    copies_ms = max(0.0, host.whole_step_ms - device.whole_step_ms)
    compute_ms = sum(device.phases_ms[name] for name in COMPUTE)
    return Ceilings(
        free_data=_gain(plain_ms, host.whole_step_ms - replaying_ms(host)),
        free_copies=_gain(plain_ms, plain_ms - copies_ms),
        compute_only=_gain(plain_ms, compute_ms),
        is_measured=True,
    )


def slowed_share(profile: Profile, host: Profile) -> float:
    """Return the share of the whole step by which its workers slow what is not waiting for them."""
    if not workers_now(profile):
        return 0.0
    rest_ms, free_ms = (x.step_ms.median - x.phases_ms["data_wait"] for x in (profile, host))
    return max(0.0, rest_ms - free_ms) / profile.whole_step_ms


def replaying_ms(host: Profile) -> float:
    """Return what drawing a replayed batch takes of a step: data that are free take nothing.

    Behind a device's queue the host draws while the device computes, and nothing is taken.
    """
    return host.phases_ms["data_wait"] if host.device_kind == "cpu" else 0.0


def _gain(plain_ms: float, least_ms: float) -> float:
    """Return how many times as fast; what is free never slows down."""
    return most_times(1 - least_ms / plain_ms)


def replay_probe(
    profile: Profile, what: str, *, company: int = 0
) -> Mapping[str, Mapping[str, Any]]:
    """Return the probe that replays the training's loaders from the `host` or the `device`.

    `company` is how many processes make batches of them alongside the training.
    """
    loaders = profile.training_loaders
    return {
        "replay": {
            "what": what,
            "company": company,
            "loaders": [loader.address for loader in loaders],
            "lengths": {
                loader.address: math.ceil(loader.batches_drawn / max(1, loader.epochs_started))
                for loader in loaders
            },
        }
    }


def _with_drift(profile: Profile, measured: Ceilings, plain_ms: Sequence[float]) -> Profile:
    drift = max(plain_ms) / min(plain_ms) - 1
    if drift > MOST_DRIFT:
        return with_note(profile, words("note.drift_too_large", share=format_share(drift)))
    profile = replace(profile, ceilings=measured)
    if drift <= DRIFT:
        return profile
    return with_note(profile, words("note.drift", share=format_share(drift)))


def with_limits(profile: Profile, runner: PassRunner) -> Profile:
    """Return the profile with a step's operations, the loader alone, and the machine's peaks."""
    if runner.left_s < runner.last_wall_s:
        return with_note(profile, words("note.no_time_limits"))
    trial = runner.run(
        words("progress.flops"),
        {"flops": {}, "loader_alone": {}, "pipeline": {}},
        steps=LIMIT_STEPS,
    )
    missing: dict[str, str] = {}
    if trial.profile is None:
        return with_note(profile, words("note.limits_failed", why=trial.message))
    flops = _flops(find_seen(trial, "flops"), missing)
    found = pipeline_of(find_seen(trial, "pipeline"), profile, runner.machine, catalogue.names())
    limits = replace(
        profile.limits or Limits(),
        flops_per_step=sum(flops.values()) or None,
        loader_samples_per_s=_loader_rate(find_seen(trial, "loader_alone"), profile, missing),
        missing=missing,
    )
    return _with_peaks(replace(profile, pipeline=found, limits=limits), main_dtype(flops), runner)


def _flops(seen: Mapping[str, Any] | None, missing: dict[str, str]) -> Mapping[str, float]:
    if seen is None:
        missing["flops_per_step"] = words("note.counter_failed")
        return {}
    if seen["uncounted"]:
        missing["flops_per_step"] = words("note.not_counted", names=tuple(seen["uncounted"]))
    flops = medians_by_step(seen["segments"], "by_dtype")
    if not any(flops.values()):
        missing["flops_per_step"] = words("note.no_products")
    return flops


def _loader_rate(
    seen: Mapping[str, Any] | None, profile: Profile, missing: dict[str, str]
) -> float | None:
    rate = loaders_per_s(seen) if seen else None
    if not profile.training_loaders:
        missing["loader_samples_per_s"] = words("note.no_feeding")
    elif rate is None:
        missing["loader_samples_per_s"] = words("note.not_drained")
    return rate


def _with_peaks(profile: Profile, dtype: str, runner: PassRunner) -> Profile:
    """Add the measured peaks, and what follows from them: the least step and the MFU."""
    limits = profile.limits or Limits()
    on_cpu = profile.device_kind == "cpu"
    wanted = PeaksOf(
        device_kind=profile.device_kind,
        device_name=profile.device_name,
        # Without a counted operation the memory's rates are still worth having.
        dtype=dtype or "float32",
        threads=runner.machine.physical_cores,
        torch_version=str(profile.environment.get("torch", "")),
        driver="" if on_cpu else str(runner.machine.facts.get("driver", "")),
    )
    runner.tell(words("progress.peaks"))
    try:
        peaks = _sound_peaks(wanted, runner.workload.python, least_rate(profile))
    except ValueError as reason:
        missing = {**limits.missing, "gemm_flops_per_s": str(reason)}
        return replace(profile, limits=replace(limits, missing=missing))
    if not peaks.is_sound:
        profile = with_note(profile, words("note.low_peaks"))
    return with_peaks(profile, peaks)


def _sound_peaks(wanted: PeaksOf, python: str, least: float) -> Peaks:
    """Return the peaks; measured again if this training was faster than those that were kept."""
    peaks = read_peaks(wanted, scratch_root(), python)
    if peaks.gemm_flops_per_s < least:
        forget_peaks(wanted, scratch_root())
        return read_peaks(wanted, scratch_root(), python)
    return peaks


def least_rate(profile: Profile) -> float:
    """Return the operations per second that the training itself reaches; 0 where not counted."""
    flops = profile.limits.flops_per_step if profile.limits else None
    return (flops or 0.0) / (profile.step_ms.median / 1e3)


def with_peaks(profile: Profile, peaks: Peaks) -> Profile:
    """Return the profile held against the peaks.

    MFU is `flops_per_step / (step_s * gemm_flops_per_s)`: operations of forward and backward,
    counted once, against the measured rate of a large product in the same arithmetic.
    """
    limits = profile.limits or Limits()
    flops = limits.flops_per_step
    limits = replace(
        limits,
        gemm_flops_per_s=peaks.gemm_flops_per_s,
        gemm_dtype=peaks.dtype,
        memory_bytes_per_s=peaks.memory_bytes_per_s,
        copy_bytes_per_s=peaks.copy_bytes_per_s,
        least_step_ms=1e3 * flops / peaks.gemm_flops_per_s if flops else None,
    )
    mfu = least_rate(profile) / peaks.gemm_flops_per_s if flops else None
    return replace(profile, limits=limits, mfu=mfu)
