"""Steps take very different times."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.5
"""Of the slow steps: below, steps of one kind differ as much."""
KOREAN = """
Steps take very different times.
  스텝마다 걸리는 시간이 크게 다릅니다.
steps take very different times
  스텝마다 걸리는 시간이 크게 다릅니다
one step in ten takes {slow} or more, half of them {median} or less ({share} of it)
  스텝 열에 하나는 {slow} 이상, 절반은 {median} 이하(그 {share}) 걸립니다
look at what the slow steps do that the others do not
  느린 스텝만 하는 일이 무엇인지 보세요
"""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report steps of which a tenth takes twice as long as half of them."""
    spread = profile.step_ms
    share = 1 - spread.median / spread.p90 if spread.p90 else 0.0
    if share < MIN_SHARE:
        return None
    slow, median = format_ms(spread.p90), format_ms(spread.median)
    of = format_share(1 - share)
    return Finding(
        code="uneven_steps",
        share=share,
        because=f"one step in ten takes {slow} or more, half of them {median} or less ({of} of it)",
        next="look at what the slow steps do that the others do not",
        evidence={"p90_ms": spread.p90, "median_ms": spread.median},
        is_bound=True,
    )
