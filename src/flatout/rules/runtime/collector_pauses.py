"""Python's garbage collector interrupts the steps."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.02
"""Of the step. Less does not show."""
MENDED_BY = frozenset({"scheduled_gc"})
KOREAN = """
Python's garbage collector interrupts the steps
  파이썬의 가비지 컬렉터가 스텝을 멈춥니다
Python's garbage collector takes {paused} of {step} ({share}, n={n})
  파이썬의 가비지 컬렉터가 스텝 {step} 가운데 {paused}({share}, n={n})를 씁니다
call gc.freeze() once data set and model are made, or collect on a schedule: {command}
  데이터셋과 모델을 만든 뒤 gc.freeze()를 부르거나, 정해 둔 스텝마다 수집하세요: {command}
"""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report what the collector takes of a step on the CPU; a device works on in the meantime."""
    if profile.device_kind != "cpu":
        return None
    step, paused_ms = profile.step_ms, profile.collection_ms_per_step
    share = min(1.0, paused_ms / step.median) if step.median else 0.0
    if share < MIN_SHARE:
        return None
    paused, of = format_ms(paused_ms), format_ms(step.median)
    command = "flatout tune --only scheduled_gc train.py"
    return Finding(
        code="collector_pauses",
        share=share,
        because=f"Python's garbage collector takes {paused} of {of} "
        f"({format_share(share)}, n={step.n})",
        next="call gc.freeze() once data set and model are made, or collect on a schedule: "
        f"{command}",
        evidence={"collection_ms_per_step": paused_ms, "step_ms": step.median},
    )
