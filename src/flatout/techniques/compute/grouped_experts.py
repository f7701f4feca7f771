"""Compute a mixture of experts in groups of tokens instead of one expert after the other.

What it does: finds modules with a router over a list of equal experts, proves in which way they
choose and weigh, sorts the tokens by expert once and multiplies each group by its expert's weights:
in one grouped product where torch has one for the device, else in one batch, or group by group.
When it helps: many experts in a Python loop with masks: some ten small operations for each of them.
What it costs: a few extra forwards before the first step; a copy of the experts' weights in each
step where products are grouped on a GPU.
How it is checked: each mixture's outputs and gradients are compared in float64 on its real inputs,
on tokens that all choose alike and on others, before it is replaced. Dropout draws other masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis.regime import addressable_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import ModelFacts, Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for, process_state

if TYPE_CHECKING:
    import torch

MIN_EXPERTS = 4
"""A loop over fewer costs few launches; as the rule `expert_loop` has it."""
MIN_SHARE = 0.05
"""Experts that hold less of the model than a twentieth are not what the step waits for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts(Technique):
    """Compute experts in groups."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
In place of the loop over experts, with the tokens sorted by expert and the weights stacked:
- for i, expert in enumerate(self.experts):
-     rows = (chosen == i).any(-1)
-     out[rows] += weight[rows] * expert(x[rows])
+ order = chosen.flatten().argsort()
+ ends = torch.bincount(chosen.flatten(), minlength=n).cumsum(0).int()
+ h = F.silu(torch._grouped_mm(x[order // k], self.w1, offs=ends))
+ y = torch._grouped_mm(h, self.w2, offs=ends)
"""

    outcome: dict[str, str] = process_state(dict)
    """Of each mixture why it was left alone, empty where it is computed in groups."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["GroupedExperts"]:
        """Return the technique for models with many experts that hold a part of the weights."""
        return [cls()] if any(_share(m) >= MIN_SHARE for m in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the experts' part of the computation to shrink by its prior."""
        model = max(profile.models, key=_share, default=None)
        share, count = (_share(model), model.experts) if model else (0.0, 0)
        compute_ms = addressable_ms(profile, ("forward", "backward"))
        return Effect(
            step_ms=-compute_ms * share * (1 - 1 / prior_for(self, profile).speedup),
            why=f"{count} experts, some {100 * share:.0f} % of the model, in groups",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Look at the first call's inputs, replace what is proven equal, then go on."""
        from flatout.kernels.expert_mixture import mixtures
        from flatout.kernels.module_proof import replacing

        if not mixtures(root):
            raise NotApplicable("no module has a router over a list of equal experts")
        return replacing(call, root, group_experts, self.outcome)

    def end(self) -> str:
        """Say how many mixtures are computed in groups, and why others are not."""
        left = {why for why in self.outcome.values() if why}
        count = sum(not why for why in self.outcome.values())
        words = "; ".join(sorted(left)) or "the first call never came"
        if not count:
            count = len(self.outcome)
            raise NotApplicable(f"flatout looked at {count} mixtures of experts: {words}")
        return f"{count} of {len(self.outcome)} mixtures in groups" + (f": {words}" if left else "")


def group_experts(model: "torch.nn.Module", *args: Any, **kwargs: Any) -> dict[str, str]:
    """Compute mixtures of experts in groups, where that is proven to be the same.

    The arguments are those of one real call of the model, in training mode: its mixtures are
    compared on what they see in it.

    Returns:
        Of each mixture why it was left alone, empty where it was replaced.
    """
    from flatout.kernels import expert_mixture, module_proof

    found = expert_mixture.mixtures(model)
    return module_proof.replaced(model, found, expert_mixture.group, (args, kwargs))


def _share(model: ModelFacts) -> float:
    """Return the experts' share of the model, 0 where they are too few to matter."""
    if model.experts < MIN_EXPERTS or not model.parameters or model.is_compiled:
        return 0.0
    return min(1.0, model.expert_parameters / max(model.all_parameters, model.parameters))


KOREAN = """
Compute experts in groups.
    전문가들을 묶어 계산합니다.
In place of the loop over experts, with the tokens sorted by expert and the weights stacked:
    전문가를 도는 반복문 대신, 토큰을 전문가별로 정렬하고 가중치를 쌓아서:
{n} experts, some {share} % of the model, in groups
    모델의 약 {share} %인 전문가 {n}개를 묶어 계산합니다
no module has a router over a list of equal experts
    같은 전문가들의 목록과 라우터가 있는 모듈이 없습니다
flatout looked at {n} mixtures of experts: {why}
    flatout이 전문가 혼합(MoE) {n}개를 살펴보았습니다: {why}
{n} of {all} mixtures in groups
    전문가 혼합(MoE) {all}개 중 {n}개를 묶어 계산합니다
{n} of {all} mixtures in groups: {why}
    전문가 혼합(MoE) {all}개 중 {n}개를 묶어 계산합니다: {why}
"""
