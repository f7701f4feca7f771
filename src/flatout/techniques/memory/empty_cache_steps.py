"""Give the allocator's unused memory back every few steps.

What it does: calls the device's `empty_cache` after every Nth optimizer step.
When it helps: the allocator holds blocks that no longer fit, and has to flush in mid-step: lengths
that vary, a validation between training steps.
What it costs: the flushed blocks are asked for again in the next step. The last resort.
How it is checked: it changes addresses only, losses are bit-identical.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.memory_pressure import is_tight, peak_bytes

if TYPE_CHECKING:
    import torch

COST_SHARE = 0.10
"""Of a step that begins with an empty cache: Hugging Face states about 10 % (TrainingArguments,
torch_empty_cache_steps); published without N, taken here for each flushed step."""
MIN_FRAGMENTATION = 0.15
"""Share of the reserved memory without a tensor: what the default allocator wastes anyway is 5 to
16 % (simulated), and flushing does not fix that."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyCacheSteps(Technique):
    """Flush the allocator's cache every few steps."""

    addresses: ClassVar[frozenset[str]] = frozenset({"fragmented_memory"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
After optimizer.step():
+ if step % $every == 0:
+     torch.cuda.empty_cache()
"""

    every: int = 10
    """Optimizer steps between two flushes."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["EmptyCacheSteps"]:
        """Return the technique only where the allocator flushed or holds much unused memory.

        What it holds is missed only where memory is tight.
        """
        story = profile.memory
        if profile.device_kind == "cpu" or story is None or not is_tight(profile, machine):
            return ()
        is_holed = (story.fragmentation_share or 0.0) >= MIN_FRAGMENTATION
        return [cls()] if story.allocation_retries or is_holed else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect every Nth step to take a tenth longer, and the unused blocks back."""
        share = (profile.memory.fragmentation_share if profile.memory else None) or 0.0
        return Effect(
            step_ms=COST_SHARE * profile.step_ms.median / self.every,
            peak_bytes=-int(share * peak_bytes(profile)),
            why=f"the cache is flushed every {self.every} steps",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Flush after every Nth step of this optimizer."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if all(p.device.type == "cpu" for p in parameters):
            raise NotApplicable("the parameters are on the CPU, whose allocator keeps no cache")
        flush_every(optimizer, self.every)
        return optimizer


def flush_every(
    optimizer: "torch.optim.Optimizer", steps: int, flush: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Flush the allocator after every Nth step of an optimizer; return what ends that."""
    import torch

    empty = flush or torch.cuda.empty_cache
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made % steps == 0:
            empty()

    return optimizer.register_step_post_hook(count).remove


KOREAN = """
Flush the allocator's cache every few steps.
    할당자의 캐시를 몇 스텝마다 비웁니다.
After optimizer.step():
    optimizer.step() 뒤에:
the cache is flushed every {n} steps
    캐시를 {n}스텝마다 비웁니다
the parameters are on the CPU, whose allocator keeps no cache
    파라미터가 CPU에 있는데 CPU의 할당자에는 캐시가 없습니다
"""
