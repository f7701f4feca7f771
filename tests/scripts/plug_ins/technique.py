"""Have the CPU take numbers that are too small for a full mantissa as zero.

What it does: calls `torch.set_flush_denormal(True)` right after torch is imported, before torch
starts its threads, which then compute the same way.
When it helps: states and activations that decay towards zero pass through such numbers, and most
CPUs compute each of them many times slower than any other.
What it costs: nothing. What is smaller than 1.2e-38 in fp32 is zero.
How it is checked: gradients match up to rounding; a test compares what is left of small numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, SourceForm, Technique, process_state

COMPUTING = ("forward", "backward", "optimizer")
SPEEDUP = 1.02
"""Of the computing: assumed. Most trainings have no such numbers, and no profile counts them."""
KOREAN = """
Compute with zero in place of numbers that are too small.
  너무 작은 수를 0으로 두고 계산합니다.
Have the CPU take numbers that are too small for a full mantissa as zero
  가수를 다 쓰지 못할 만큼 작은 수를 CPU가 0으로 다루게 합니다
At the start of the script:
  스크립트 맨 앞에:
numbers below 1.2e-38 are slow where there are any
  1.2e-38보다 작은 수가 있으면 그 계산이 느립니다
the process flushes them already
  이 프로세스는 이미 그런 수를 0으로 다룹니다
this CPU cannot flush them
  이 CPU는 그런 수를 0으로 다루지 못합니다
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlushDenormals(Technique):
    """Compute with zero in place of numbers that are too small."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "optimizer"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
At the start of the script:
+ torch.set_flush_denormal(True)
"""
    source: ClassVar[SourceForm | None] = SourceForm(start="torch.set_flush_denormal(True)")

    switched: list[bool] = process_state(list)
    """Whether it switched this process, which is then switched back."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["FlushDenormals"]:
        """Return the technique for models that compute in fp32 on the CPU."""
        is_fp32 = any("float32" in m.dtypes and not m.used_autocast for m in profile.models)
        return [cls()] if profile.device_kind == "cpu" and is_fp32 else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect little, so that it is tried last: whether there are such numbers is not known."""
        compute_ms = profile.step_ms.median * profile.share(*COMPUTING)
        return Effect(
            step_ms=-compute_ms * (1 - 1 / SPEEDUP),
            why="numbers below 1.2e-38 are slow where there are any",
        )

    def start(self) -> None:
        """Switch it on for this thread and those that torch starts from it."""
        if is_flushing():
            raise NotApplicable("the process flushes them already")
        if not flush_denormals():
            raise NotApplicable("this CPU cannot flush them")
        self.switched.append(True)

    def end(self) -> str:
        """Switch it off again."""
        if self.switched:
            flush_denormals(is_on=False)
        return ""


def flush_denormals(*, is_on: bool = True) -> bool:
    """Set how this thread computes with numbers that are too small; return whether it can be set.

    Threads that are started later inherit it. So it is to be called before the first operation of
    torch that takes several threads.
    """
    import torch

    return torch.set_flush_denormal(is_on)


def is_flushing() -> bool:
    """Return whether this thread takes numbers that are too small as zero; torch does not tell."""
    import torch

    return float(torch.tensor(2.0**-126) * 0.5) == 0.0
