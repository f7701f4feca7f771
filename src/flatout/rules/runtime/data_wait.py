"""The step waits for the next batch."""

from flatout.analysis.feeding import cores_of, useful_workers, workers_now
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_ratio, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, fixing the loader is not worth a reader's time."""
MIN_GAIN = 1.15
"""What a run with free data has to gain, where there was one: the number of DL01 in the catalogue
of diagnostics. A wait while the device works off its queue costs nothing."""

DIFFERENT = 0.01
"""Shares that differ by more are two numbers to a reader, who has to be told why."""
CHEAPER = "make loading itself cheaper: smaller images, fewer transforms per sample"
FOREIGN = (
    "give the loader more workers in the script: it is another kind than torch's DataLoader, which "
    "techniques do not reach; then flatout measure again"
)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the wait when it is at least `MIN_SHARE` of the step, and free data is faster."""
    share, ceilings = profile.lost_to_data, profile.ceilings
    if share < MIN_SHARE or (ceilings.is_measured and ceilings.free_data < MIN_GAIN):
        return None
    wait_ms, step_ms = profile.phases_ms["data_wait"], profile.step_ms.median
    workers, cores = workers_now(profile), cores_of(profile, machine)
    known = f" with {workers} loader workers" if profile.training_loaders else ""
    return Finding(
        code="data_wait",
        share=share,
        because=(
            f"the step waits {format_ms(wait_ms)} of {format_ms(step_ms)} for its batch "
            f"({format_share(wait_ms / step_ms)}, n={profile.step_ms.n}){known}; "
            f"{_gain(profile)}"
        ),
        next=_next(workers, cores, useful_workers(profile, machine))
        if profile.training_loaders
        else FOREIGN,
        evidence={
            "data_wait_ms": wait_ms,
            "step_ms": step_ms,
            "workers": float(workers),
            "usable_cores": float(cores),
            "free_data_ratio": ceilings.free_data,
        },
    )


def _gain(profile: Profile) -> str:
    """Say what free data gives; where it is less than the wait, which part of that is lost."""
    times, share = format_ratio(profile.ceilings.free_data), profile.lost_to_data
    if profile.share("data_wait") - share > DIFFERENT:
        return (
            f"a run with free data was {times} as fast, so {format_share(share)} of the step is "
            "lost to the wait"
        )
    return f"with data for free it would be {times} as fast"


def _next(workers: int, cores: int, useful: int) -> str:
    if workers == 0:
        return (
            "load in worker processes: "
            "flatout tune --only loader_workers,persistent_workers train.py"
        )
    if workers > max(cores, useful):
        return (
            f"{workers} workers share {cores} cores: fewer may be faster: "
            "flatout tune --only loader_workers,cpu_threads train.py"
        )
    if workers >= useful:
        return f"more workers do not help: {CHEAPER}"
    return (
        f"try up to {useful} workers: flatout tune --only loader_workers train.py; "
        f"beyond that, {CHEAPER}"
    )
