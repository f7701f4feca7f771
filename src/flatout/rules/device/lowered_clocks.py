"""The GPU runs below its clocks, for heat or supply."""

from flatout.analysis.disturbance import slowdown
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_share

REASONS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "power brake",
)
"""What cooling and supply are for. A power cap is how the product works."""
MIN_TIME = 0.10
"""Share of the samples: drivers show a slowdown for a moment when the load jumps."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report lowered clocks; the step grows by what the clock lost at most."""
    readings = profile.gpu
    if readings is None or not readings.clock_mhz or not readings.max_clock_mhz:
        return None
    name = max(REASONS, key=lambda each: readings.throttle_shares.get(each, 0.0))
    lasting = readings.throttle_shares.get(name, 0.0)
    lost = 1 - readings.clock_mhz / readings.max_clock_mhz
    if lasting < MIN_TIME or lost <= 0:
        return None
    return Finding(
        code="lowered_clocks",
        share=lost,
        is_bound=True,
        because=words(
            "finding.lowered_clocks.because",
            name=slowdown(name),
            time=format_share(lasting),
            clock=f"{readings.clock_mhz:.0f}",
            most=f"{readings.max_clock_mhz:.0f}",
        ),
        next=words("finding.lowered_clocks.next"),
        evidence={"clock_mhz": readings.clock_mhz, "max_clock_mhz": readings.max_clock_mhz},
    )
