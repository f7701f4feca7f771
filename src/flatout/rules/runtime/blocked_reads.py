"""Batches are late because reading their samples blocks, not because computing them takes long."""

from flatout.analysis.feeding import cores_of, useful_workers, workers_now
from flatout.records.finding import Finding
from flatout.records.journey import Journey
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes, format_ms, format_share
from flatout.rules.runtime.data_wait import foreign

MIN_WAIT = 0.10
"""Below a tenth of the step, waiting for data is not worth a reader's time."""
MIN_BLOCKED = 0.50
"""Least share of a batch's making that is blocked: from half on it decides what helps."""
MADE = ("read", "decode", "collate")
AT_LINES = ("DL02", "DL03", "DL04", "DL05", "DL06")
IN_PROJECT = ("DL23",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the wait where most of making a batch is being blocked."""
    wait = profile.lost_to_data
    if profile.journey is None or wait < MIN_WAIT:
        return None
    made, blocked = _made_ms(profile.journey)
    if not made or blocked / made < MIN_BLOCKED:
        return None
    known = [facts.storage_bytes_per_step for facts in profile.journey.workers]
    stored = sum(count or 0.0 for count in known)
    name = "because" if stored else "because_cached"
    if not set(known) - {None}:
        name = "because_unknown"
    return Finding(
        code="blocked_reads",
        share=wait * blocked / made,
        because=words(
            f"finding.blocked_reads.{name}",
            made=format_ms(made),
            blocked=format_ms(blocked),
            share=format_share(blocked / made),
            **({"size": format_bytes(stored)} if name == "because" else {}),
        ),
        next=_next(profile, machine),
        lines=tuple(loader.line for loader in profile.training_loaders if loader.line),
        evidence={
            "blocked_ms": blocked,
            "made_ms": made,
            "data_wait_share": profile.share("data_wait"),
            "storage_bytes_per_step": stored,
        },
    )


def _made_ms(journey: Journey) -> tuple[float, float]:
    """Return milliseconds of making a step's batches, and how many of them were blocked."""
    legs = [leg for leg in journey.legs if leg.name in MADE]
    return sum(leg.ms for leg in legs), sum(leg.ms for leg in legs if leg.name == "read")


def _next(profile: Profile, machine: Machine) -> str:
    if not profile.training_loaders:
        return foreign()
    tune = "flatout tune --only loader_workers,persistent_workers train.py"
    useful, now = useful_workers(profile, machine), workers_now(profile)
    if now >= useful:
        return words("finding.blocked_reads.next_local", command="flatout pack")
    name = "next_more" if useful <= cores_of(profile, machine) else "next_pack"
    return words(f"finding.blocked_reads.{name}", n=str(useful), command=tune)
