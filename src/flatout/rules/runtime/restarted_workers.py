"""Loader workers end with every epoch and start again for the next."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.05
"""Of the training; what is left of a start with workers that live on is less."""
MENDED_BY = frozenset({"persistent_workers"})
AT_LINES = ("DL05", "DL06")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report what starting the workers takes of an epoch, where they could live on."""
    again = [each for each in profile.training_loaders if each.workers]
    live_on = any(each.persistent_workers and each.builds == 1 for each in again)
    if not again or live_on or not profile.epoch_steps:
        return None
    share = 1 - profile.step_ms.median / profile.whole_step_ms if profile.whole_step_ms else 0.0
    if share < MIN_SHARE:
        return None
    # Workers that would live on end with their loader.
    name = "next_built" if all(each.persistent_workers for each in again) else "next"
    return Finding(
        code="restarted_workers",
        share=share,
        because=words(
            "finding.restarted_workers.because",
            start=format_ms(profile.epoch_start_ms),
            n=str(profile.epoch_steps),
            share=format_share(share),
        ),
        next=words(
            f"finding.restarted_workers.{name}",
            command="flatout tune --only persistent_workers train.py",
        ),
        evidence={
            "epoch_start_ms": profile.epoch_start_ms,
            "epoch_steps": float(profile.epoch_steps),
        },
        lines=tuple(each.line for each in again if each.line),
    )
