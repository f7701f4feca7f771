"""Update each parameter inside backward and free its gradient at once.

What it does: watches the first step; if no one needs the gradients between backward and step, each
later backward updates a parameter as soon as its gradient is whole.
When it helps: gradients fill a good part of the memory: large models, small batches.
What it costs: an update per tensor instead of one for all: more launches on a GPU. It does not go
with techniques that act around whole steps: the one that comes second is refused.
How it is checked: losses, gradients and updates are bit-identical; the state keeps its form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis.stream_changes import BUCKETS, without_optimizer_temporaries
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Component, Draft, MemoryStream, Phase
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    PlannedDevice,
    Rescue,
    Technique,
    process_state,
)
from flatout.techniques.memory_pressure import is_tight, parameter_bytes

if TYPE_CHECKING:
    from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import GradientWatch

FREED_SHARE = 0.9
"""Of the gradients: one tensor's is there at a time. Assumed; torchtune publishes 7 % of the whole
memory."""
COST_SHARE = 0.05
"""Of the step: 0.96x and 0.94x for a small GPT (two runs of the suite techniques, n=3 each)."""
READS_GRADIENTS = ("aten._foreach_norm", "aten.linalg_vector_norm", "aten.reciprocal")
"""Operators that make one number between backward and update: the norms that clipping takes, and
the inverse scale of a GradScaler."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInBackward(Technique):
    """Update parameters inside backward."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    rescues: ClassVar[tuple[Rescue, ...]] = (Rescue(cost=0.02),)
    by_hand: ClassVar[str] = """
With an optimizer for each parameter, and no optimizer.step() in the loop:
+ optimizers = {p: torch.optim.AdamW([p], lr=...) for p in model.parameters()}
+ def update(p):
+     optimizers[p].step()
+     optimizers[p].zero_grad()
+ for p in model.parameters():
+     p.register_post_accumulate_grad_hook(update)
"""

    watches: "list[GradientWatch]" = process_state(list)
    """Sees who looks at gradients before the first step; gone after it."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["OptimizerInBackward"]:
        """Return the technique for one backward per step where memory is tight."""
        is_single = profile.backwards_per_step <= 1 and len(profile.optimizers) == 1
        is_alone = len(profile.ranks) < 2
        return [cls()] if is_single and is_alone and is_tight(profile, machine) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="each gradient is used and freed at once; not with accumulation or clipping",
                change=with_updates_in_backward,
                helps=may_step_in_backward,
                group="update",
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the gradients back, and a little longer steps."""
        freed = int(FREED_SHARE * parameter_bytes(profile))
        return Effect(
            step_ms=COST_SHARE * profile.step_ms.median,
            peak_bytes=-freed,
            why="one gradient at a time instead of all, stepped one by one",
        )

    def start(self) -> None:
        """Watch who looks at gradients, until the first step."""
        from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import (
            GradientWatch,
        )

        self.watches.append(GradientWatch())
        self.watches[0].begin()

    def optimizer(self, optimizer: Any) -> Any:
        """Let it step in backward, if the first step allows it."""
        from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import (
            find_obstacle,
            step_in_backward,
        )

        watch = self.watches.pop() if self.watches else None
        if watch is None:
            raise NotApplicable("only the optimizer that steps first is watched")
        watch.end()
        reason = find_obstacle(optimizer, watch)
        if reason is not None:
            raise NotApplicable(reason)
        step_in_backward(optimizer)
        return optimizer


def with_updates_in_backward(stream: MemoryStream) -> MemoryStream:
    """Each gradient is used and freed as soon as it is there; one update at a time."""
    draft = Draft(without_optimizer_temporaries(stream))
    for index, allocation in enumerate(draft.stream.allocations):
        if allocation.component is Component.GRADIENTS:
            draft.die_before(index, draft.lives[index].birth + 1)
    return draft.build()


def may_step_in_backward(stream: MemoryStream, device: PlannedDevice) -> bool:
    """Return whether a gradient may be used when it comes.

    Not where ranks have yet to average it, another backward adds to it, or all are read at once.
    """
    last = stream.steps - 1
    if device.ranks > 1 or any(each.operator == BUCKETS for each in stream.allocations):
        return False
    backwards = sum(mark.phase is Phase.BACKWARD and mark.step == last for mark in stream.marks)
    is_read = any(
        each.step == last
        and each.phase in (Phase.BACKWARD, Phase.OPTIMIZER)
        and not each.shape
        and each.operator.startswith(READS_GRADIENTS)
        for each in stream.allocations
    )
    return backwards == 1 and not is_read


KOREAN = """
Update parameters inside backward.
    파라미터를 역전파 안에서 갱신합니다.
With an optimizer for each parameter, and no optimizer.step() in the loop:
    파라미터마다 옵티마이저를 두고 루프의 optimizer.step()을 없앱니다:
each gradient is used and freed at once; not with accumulation or clipping
    그래디언트를 만들자마자 쓰고 해제합니다. 누적이나 클리핑과는 함께 쓸 수 없습니다
one gradient at a time instead of all, stepped one by one
    그래디언트를 모두 두지 않고 하나씩 갱신합니다
only the optimizer that steps first is watched
    가장 먼저 스텝하는 옵티마이저만 지켜봅니다
"""
