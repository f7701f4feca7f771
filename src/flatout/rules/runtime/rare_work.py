"""Some steps take much longer than the others, outside model and optimizer."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.10
"""Of the run: below a tenth, the median step is what a training is made of."""
IN_PROJECT = ("SYN05",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report what is done, or waited for, every few steps and takes a large part of the run."""
    rare = profile.rare
    if rare is None or rare.share < MIN_SHARE:
        return None
    what = "work"
    if max(rare.saving_share, rare.waiting_share) > 0.5:
        what = "saving" if rare.saving_share > rare.waiting_share else "waiting"
    return Finding(
        code="rare_work",
        share=rare.share,
        of="run",
        because=words(
            f"finding.rare_work.because_{what}",
            share=format_share(rare.share),
            n=str(rare.steps),
            of=str(rare.of_steps),
            time=format_ms(rare.ms),
        ),
        next=words(f"finding.rare_work.next_{what}"),
        evidence={"ms": rare.ms, "steps": float(rare.steps), "of_steps": float(rare.of_steps)},
    )
