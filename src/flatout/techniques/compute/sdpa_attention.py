"""Let torch's fused operator compute attention that the model writes out by hand.

What it does: traces the forward of each module of the script's own that takes a softmax, finds
`softmax(q @ k^T * scale + mask) @ v`, and calls `scaled_dot_product_attention` in its place.
When it helps: attention over long sequences: the weights are never written to memory.
What it costs: one extra forward before the first step, to see real inputs.
How it is checked: each module's outputs and gradients are compared in float64 on its real inputs
before it is replaced; losses and gradients match up to rounding. Dropout draws other masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.describe import softmax_modules
from flatout.analysis.regime import SMALL_WORK_CAUSES, addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    prior_for,
    process_state,
)

if TYPE_CHECKING:
    import torch

LOOKED = "flatout looked at {count} modules with a softmax: {why}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaAttention(Technique):
    """Call torch's fused attention where the model writes attention out."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
In the attention module, for a causal mask:
- scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
- scores = scores.masked_fill(mask == 0, float("-inf"))
- y = scores.softmax(dim=-1) @ v
+ y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""

    outcome: dict[str, str] = process_state(dict)
    """Of each module that was looked at why it was left alone, empty where it was replaced."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["SdpaAttention"]:
        """Return the technique for models with modules of their own that take a softmax."""
        return [cls()] if any(m.softmax_modules for m in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect forward and backward to shrink by its prior, in bf16 on a CPU to grow."""
        compute_ms = addressable_ms(profile, ("forward", "backward"), SMALL_WORK_CAUSES)
        count = sum(model.softmax_modules for model in profile.models)
        speedup = prior_for(self, profile).speedup
        return Effect(
            step_ms=-compute_ms * (1 - 1 / speedup),
            why=f"{count} modules that may write attention out, one operator in place of five",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Look at the first call's inputs, replace what is proven equal, then go on."""
        if not softmax_modules(root):
            raise NotApplicable("no module of the model's own takes a softmax")
        from flatout.kernels.module_proof import replacing

        return replacing(call, root, use_fused_attention, self.outcome)

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between the forwards as they are and what replaces them, proven in one call."""
        found = [module for root in training.roots for _, module in softmax_modules(root)]
        if all("forward" in vars(module) for module in found):
            raise NotApplicable("no module of the model's own takes a softmax")
        # One that only calls such a module may be replaced in its place.
        modules = [m for root in training.roots for m in root.modules() if "forward" not in vars(m)]
        ready: list[tuple[Any, Any]] = []

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            for module, forward in ready:
                if is_on:
                    module.__dict__["forward"] = forward
                else:
                    module.__dict__.pop("forward", None)

        def check() -> None:
            if not ready:
                ready.extend((m, m.__dict__["forward"]) for m in modules if "forward" in vars(m))
            if not ready:
                self.end()  # says why none was replaced

        return Switch(
            turn=turn,
            call=lambda call, root: call if ready else self.forward(call, root),
            check=check,
        )

    def end(self) -> str:
        """Say how many modules were replaced."""
        replaced = [name for name, why in self.outcome.items() if not why]
        if not replaced:
            reasons = sorted(set(self.outcome.values())) or ["the first call never came"]
            raise NotApplicable(LOOKED.format(count=len(self.outcome), why="; ".join(reasons)))
        return f"{len(replaced)} of {len(self.outcome)} modules replaced"


def use_fused_attention(model: "torch.nn.Module", *args: Any, **kwargs: Any) -> dict[str, str]:
    """Replace attention written by hand by torch's fused operator, where that is proven equal.

    The arguments are those of one real call of the model, in training mode: its modules are
    compared on what they see in it.

    Returns:
        Of each module with a softmax why it was left alone, empty where it was replaced.
    """
    from flatout.kernels.sdpa_rewrite import replace_all

    return replace_all(model, softmax_modules(model), (args, kwargs))


KOREAN = """
Call torch's fused attention where the model writes attention out.
    모델이 풀어 쓴 어텐션을 torch의 융합 어텐션으로 바꿉니다.
In the attention module, for a causal mask:
    어텐션 모듈에서, 인과 마스크의 경우:
flatout looked at {n} modules with a softmax: {why}
    flatout이 softmax가 있는 모듈 {n}개를 살펴보았습니다: {why}
{n} modules that may write attention out, one operator in place of five
    어텐션을 풀어 쓴 것으로 보이는 모듈 {n}개에서 연산자 다섯을 하나로 바꿉니다
no module of the model's own takes a softmax
    모델 자체의 모듈 가운데 softmax를 쓰는 것이 없습니다
{n} of {all} modules replaced
    모듈 {all}개 중 {n}개를 바꾸었습니다
"""
