"""Keep the optimizer's moments in 4 bits.

What it does: lets Adam or AdamW become torchao's 4-bit kind at its first step. A saved state is
written in full precision, and read back into 4 bits.
When it helps: the optimizer's state does not fit even in 8 bits: it shrinks to an eighth.
What it costs: moments of sixteen levels; the optimizer is compiled at its first step.
How it is checked: for finite losses and gradients only; this changes the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Rescue, Technique
from flatout.techniques.memory_pressure import is_tight, state_bytes
from flatout.techniques.optimizer.eight_bit_optimizer import (
    ADAM_NAMES,
    find_obstacle,
    own_bytes,
    pack_moments,
)

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Elements that share a scale; torchao's default."""
SAVED_SHARE = 0.86
"""Of Adam's state: 4 bits of 32, and a scale for every 128. Small tensors stay as they are."""
SLOWER_SHARE = 0.09
"""Of the step: 3200 to 2900 tokens/s for Llama2-7B on an A100, as with 8 bits (torchao,
published)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitOptimizer(Technique):
    """Keep Adam's moments in 4 bits."""

    family: ClassVar[str] = "optimizer"
    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(
            cost=0.01,
            instead_of=frozenset({"adafactor", "eight_bit_optimizer", "optimizer_in_backward"}),
        ),
    )
    extra: ClassVar[str] = "lowbit"
    by_hand: ClassVar[str] = """
Where the optimizer is made, with torchao installed:
- optimizer = torch.optim.AdamW(...)
+ optimizer = torchao.optim.AdamW4bit(...)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["FourBitOptimizer"]:
        """Return the technique for Adam where memory is tight.

        The process tells if torchao lacks.
        """
        is_adam = any(optimizer.name in ADAM_NAMES for optimizer in profile.optimizers)
        return [cls()] if is_adam and is_tight(profile, machine) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect seven eighths of the optimizer's state back."""
        del machine
        return Effect(
            step_ms=SLOWER_SHARE * profile.step_ms.median,
            peak_bytes=own_bytes(profile) - int(SAVED_SHARE * state_bytes(profile)),
            why="moments of 4 bits instead of 32",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Change the optimizer's class."""
        reason = find_obstacle(optimizer, BLOCK)
        if reason is not None:
            raise NotApplicable(reason)
        to_four_bits(optimizer)
        return optimizer


def to_four_bits(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let an Adam keep its moments in 4 bits; call it before its first step.

    Its state_dict stays that of the plain optimizer, both ways.
    """
    return pack_moments(optimizer, "4bit", BLOCK)
