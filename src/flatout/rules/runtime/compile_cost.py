"""Compiling takes longer than the training in which it should pay back."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_duration, format_ratio


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a script's own compiling where only a gain above 2x would pay it back."""
    made, steps = profile.compiling, profile.planned_steps
    if made is None or not steps:
        return None
    training_s = steps * profile.whole_step_ms / 1e3
    if made.seconds <= training_s:
        return None
    return Finding(
        code="compile_cost",
        share=made.seconds / (made.seconds + training_s),
        of="training",
        because=words(
            "finding.compile_cost.because",
            time=format_duration(made.seconds),
            steps=f"{steps:,.0f}",
            training=format_duration(training_s),
            ratio=format_ratio(1 + made.seconds / training_s),
        ),
        next=words("finding.compile_cost.next"),
        evidence={"compile_s": made.seconds, "training_s": training_s, "steps": float(steps)},
    )
