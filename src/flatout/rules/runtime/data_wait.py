"""The step waits for the next batch."""

from flatout.analysis.feeding import (
    cores_of,
    loading,
    useful_workers,
    worker_facts,
    workers_now,
)
from flatout.records.finding import Finding
from flatout.records.journey import WORKERS
from flatout.records.machine import Machine
from flatout.records.messages import Text, words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_ratio, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, fixing the loader is not worth a reader's time."""
MIN_GAIN = 1.15
"""What a run with free data has to gain, where there was one: the number of DL01 in the catalogue
of diagnostics. A wait while the device works off its queue costs nothing."""

SENT_FOR_MORE = 1.5
"""Where the wait is so many times what making the batches takes in all, workers do not pay."""
DIFFERENT = 0.01
"""Shares that differ by more are two numbers to a reader, who has to be told why."""
AT_LINES = ("DL02", "DL03", "DL04", "DL05", "DL06")


def foreign() -> str:
    """Return what helps where the loader is of another kind than torch's."""
    return words("finding.data_wait.next_foreign")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the wait when it is at least `MIN_SHARE` of the step, and free data is faster."""
    share, ceilings = profile.lost_to_data, profile.ceilings
    if share < MIN_SHARE or (ceilings.is_measured and ceilings.free_data < MIN_GAIN):
        return None
    wait_ms, step_ms = profile.phases_ms["data_wait"], profile.step_ms.median
    workers, cores = workers_now(profile), cores_of(profile, machine)
    return Finding(
        code="data_wait",
        share=share,
        because=_because(profile, workers),
        next=_next(profile, cores, useful_workers(profile, machine))
        if profile.training_loaders
        else foreign(),
        lines=tuple(loader.line for loader in profile.training_loaders if loader.line),
        evidence={
            "data_wait_ms": wait_ms,
            "step_ms": step_ms,
            "workers": float(workers),
            "usable_cores": float(cores),
            "free_data_ratio": ceilings.free_data,
        },
    )


def _because(profile: Profile, workers: int) -> str:
    """Return the wait; where free data gives less than it, also which part of that is lost."""
    wait_ms, step_ms = profile.phases_ms["data_wait"], profile.step_ms.median
    lost = profile.lost_to_data
    fields: dict[str, Text] = {
        "wait": format_ms(wait_ms),
        "step": format_ms(step_ms),
        "share": format_share(wait_ms / step_ms),
        "n": str(profile.step_ms.n),
        "gain": format_ratio(profile.ceilings.free_data)[:-1],
    }
    name = "because"
    if profile.training_loaders:
        fields["workers"] = str(workers)
    else:
        name += "_foreign"
    if profile.share("data_wait") - lost > DIFFERENT:
        name += "_less"
        fields["lost"] = format_share(lost)
    return words(f"finding.data_wait.{name}", **fields)


def _workers_cost_more(profile: Profile, made_ms: float) -> bool:
    """Return whether the loop would make its batches faster than it gets them from workers."""
    journey, pipeline = profile.journey, profile.pipeline
    if journey is None or not worker_facts(profile) or (pipeline and not pipeline.is_fed):
        return False
    legs = {leg.name: leg.ms for leg in journey.legs if leg.where == WORKERS}
    is_blocked = legs.get("read", 0.0) > made_ms / 2
    return not is_blocked and SENT_FOR_MORE * made_ms < profile.phases_ms["data_wait"]


def _next(profile: Profile, cores: int, useful: int) -> str:
    tune = "flatout tune --only loader_workers"
    workers, made_ms = workers_now(profile), loading(profile, cores).total_ms
    if workers and _workers_cost_more(profile, made_ms):
        command = f"{tune} train.py"
        return words("finding.data_wait.next_none", made=format_ms(made_ms), command=command)
    if workers == 0:
        command = f"{tune},persistent_workers train.py"
        return words("finding.data_wait.next_workers", command=command)
    if workers > max(cores, useful):
        return words(
            "finding.data_wait.next_fewer",
            workers=str(workers),
            cores=str(cores),
            command=f"{tune},cpu_threads train.py",
        )
    if workers >= useful:
        return words("finding.data_wait.next_cheaper")
    command = f"{tune} train.py"
    return words("finding.data_wait.next_other", workers=str(useful), command=command)
