"""Update the parameters in groups of tensors, one operation for a whole group.

What it does: switches the optimizer to torch's foreach implementation.
When it helps: optimizers without a fused implementation, on the CPU, with many parameters: torch's
default there goes from tensor to tensor. On CUDA it is the default already.
What it costs: about the size of the parameters in temporary memory.
How it is checked: the update matches the baseline's own optimizer up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.switching import OptimizerGroups
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import OptimizerFacts, Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
    prior_for,
)
from flatout.techniques.memory_pressure import activation_bytes, parameter_bytes

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForeachOptimizer(Technique):
    """Update the parameters in groups of tensors."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"optimizer", "slow_optimizer"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the optimizer is made:
+ optimizer = RMSprop(..., foreach=True)
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        optimizer={"foreach": "True"},
        optimizers=("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RMSprop", "SGD"),
    )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ForeachOptimizer"]:
        """Return the technique where torch goes from tensor to tensor."""
        is_slow = any(_is_looped(item, profile.device_kind) for item in profile.optimizers)
        return [cls()] if is_slow and profile.share("optimizer") > 0 else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the optimizer's share to shrink by its prior, for a copy of the parameters.

        What the backward held is free by then: the copy raises the peak by what does not fit there.
        """
        optimizer_ms = profile.step_ms.median * profile.share("optimizer")
        return Effect(
            step_ms=-optimizer_ms * (1 - 1 / prior_for(self, profile).speedup),
            peak_bytes=max(0, parameter_bytes(profile) - activation_bytes(profile)),
            why=f"groups of tensors instead of one after the other in {optimizer_ms:.1f} ms",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Switch to the foreach implementation."""
        reason = find_obstacle(optimizer)
        if reason is not None:
            raise NotApplicable(reason)
        update_in_groups(optimizer)
        return optimizer

    def switch(self, training: RunningTraining) -> Switch:
        """Set the groups' flag; the state is the same."""
        groups = OptimizerGroups(training.optimizers, find_obstacle)
        return Switch(turn=lambda is_on: groups.turn({"foreach": True} if is_on else None))


def update_in_groups(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Switch an optimizer to its foreach implementation; at any time, the state is the same."""
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["foreach"] = True
    return optimizer


def find_obstacle(optimizer: "torch.optim.Optimizer") -> str | None:
    """Return why an optimizer cannot work in groups now, or None."""
    from flatout.agent.optimizer_swap import find_successor

    # Its class may change as late as at the end of this step.
    kind = find_successor(optimizer) or type(optimizer)
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    obstacles = {
        "it has no foreach implementation": any("foreach" not in group for group in groups),
        "it is fused, which is faster": any(group.get("fused") for group in groups),
        "the script chose its implementation itself": _is_chosen(optimizer),
        "it has a step of its own": not kind.step.__module__.startswith("torch.optim."),
        "differentiable steps go from tensor to tensor": any(
            group.get("differentiable") for group in groups
        ),
        "its rate is a tensor, which Adam does not take in groups": _has_tensor_rate(optimizer),
        "on CUDA torch works in groups already": all(p.is_cuda for p in parameters)
        and all(group.get("foreach") is None for group in groups),
    }
    return next((why for why, is_true in obstacles.items() if is_true), None)


def _is_chosen(optimizer: "torch.optim.Optimizer") -> bool:
    # Groups that were loaded say what the technique chose when they were saved.
    is_loaded = len(optimizer.state) > 0
    is_set = any(group.get("foreach") for group in optimizer.param_groups)
    return bool(optimizer.defaults.get("foreach")) or (is_set and not is_loaded)


def _has_tensor_rate(optimizer: "torch.optim.Optimizer") -> bool:
    import torch

    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    groups = optimizer.param_groups if is_adam else ()
    return any(isinstance(g["lr"], torch.Tensor) and not g["capturable"] for g in groups)


def _is_looped(facts: OptimizerFacts, device_kind: str) -> bool:
    if facts.is_fused or not facts.has_foreach_option:
        return False
    return facts.is_foreach is False or (facts.is_foreach is None and device_kind == "cpu")


KOREAN = """
Update the parameters in groups of tensors.
    파라미터를 텐서 묶음 단위로 갱신합니다.
groups of tensors instead of one after the other in {ms} ms
    {ms} ms 동안 텐서를 하나씩 갱신하는 대신 묶어서 갱신합니다
it has no foreach implementation
    옵티마이저에 foreach 구현이 없습니다
it is fused, which is faster
    이미 더 빠른 fused 구현을 씁니다
differentiable steps go from tensor to tensor
    미분 가능한 스텝은 텐서를 하나씩 갱신합니다
its rate is a tensor, which Adam does not take in groups
    학습률이 텐서인데, Adam은 묶어서 갱신할 때 텐서를 받지 않습니다
on CUDA torch works in groups already
    CUDA에서는 torch가 이미 묶어서 갱신합니다
"""
