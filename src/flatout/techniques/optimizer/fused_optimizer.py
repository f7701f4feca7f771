"""Update all parameters in one pass.

What it does: switches the optimizer to torch's fused implementation, which reads and writes each
parameter, gradient and state once instead of once per operation.
When it helps: the optimizer takes a visible part of the step: many parameters, small batches.
What it costs: nothing known; for a few tensors it can be slower.
How it is checked: the update matches the baseline's own optimizer up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.switching import OptimizerGroups
from flatout.analysis.stream_changes import without_optimizer_temporaries
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
    prior_for,
)

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOptimizer(Technique):
    """Update all parameters in one pass."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"optimizer", "slow_optimizer"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the optimizer is made:
+ optimizer = AdamW(..., fused=True)
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        optimizer={"fused": "True"}, optimizers=("Adam", "AdamW", "SGD", "Adagrad")
    )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["FusedOptimizer"]:
        """Return the technique when an optimizer that can be fused takes any time."""
        can_fuse = any(o.has_fused_option and not o.is_fused for o in profile.optimizers)
        return [cls()] if can_fuse and profile.share("optimizer") > 0 else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="the update makes no temporaries",
                change=without_optimizer_temporaries,
                helps=lambda stream, _: (
                    without_optimizer_temporaries(stream).alive() != stream.alive()
                ),
                group="update",
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the optimizer's share to shrink by its prior."""
        optimizer_ms = profile.step_ms.median * profile.share("optimizer")
        return Effect(
            step_ms=-optimizer_ms * (1 - 1 / prior_for(self, profile).speedup),
            why=f"one pass instead of many over the parameters in {optimizer_ms:.1f} ms",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Switch to the fused implementation."""
        reason = find_obstacle(optimizer)
        if reason is not None:
            raise NotApplicable(reason)
        switch_to_fused(optimizer)
        return optimizer

    def switch(self, training: RunningTraining) -> Switch:
        """Set the groups' flags; step counts are where the implementation that is on wants them."""
        groups = OptimizerGroups(training.optimizers, find_obstacle_while_running)
        return Switch(turn=lambda is_on: turn_fused(groups, is_on=is_on))


def turn_fused(groups: OptimizerGroups, *, is_on: bool) -> None:
    """Switch optimizers that have made steps to their fused implementation, or back."""
    groups.turn({"fused": True, "foreach": None} if is_on else None)
    for optimizer in groups.optimizers:
        optimizer._step_supports_amp_scaling = is_on
        if is_on and "momentum" in optimizer.defaults:
            groups.handles.append(optimizer.register_step_pre_hook(_give_buffers))
        _put_counts(optimizer, is_fused=is_on)


def _put_counts(optimizer: "torch.optim.Optimizer", *, is_fused: bool) -> None:
    import torch

    for parameter, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            # On another device than the parameter's each step would wait for the count.
            state["step"] = count.to(parameter.device if is_fused else "cpu", torch.float32)


def fuse(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Switch an optimizer to its fused implementation; call it before the first step.

    Unlike `AdamW(fused=True)` it also works when the parameters moved to their device after the
    optimizer was built.

    Raises:
        ValueError: if this optimizer cannot be fused; the text says why.
    """
    reason = find_obstacle(optimizer)
    if reason is not None:
        raise ValueError(f"{type(optimizer).__name__} cannot be fused: {reason}")
    switch_to_fused(optimizer)
    return optimizer


def switch_to_fused(optimizer: "torch.optim.Optimizer") -> None:
    """Set what the fused implementation reads: the groups, later groups, and the scaler's flag.

    What is loaded later on is fused too. A saved state goes on in the plain script, fused there as
    well, but for groups that torch alone cannot go on with.
    """
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["fused"], group["foreach"] = True, None
    # GradScaler asks for this flag: the fused implementation unscales on its own.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    _put_counts(optimizer, is_fused=True)
    optimizer.register_load_state_dict_pre_hook(_load_fused)
    if "momentum" in optimizer.defaults:
        optimizer.register_step_pre_hook(_give_buffers)
        optimizer.register_state_dict_post_hook(_save_plain)


def _load_fused(_optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """Take a plain optimizer's groups as fused ones: the scaler goes on to leave its work to them.

    Torch then puts their step counts where the fused implementation wants them.
    """
    groups = [{**group, "fused": True, "foreach": None} for group in loaded["param_groups"]]
    return {**loaded, "param_groups": groups}


def _give_buffers(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give each parameter that is about to get its first momentum a buffer of zeros.

    Torch's fused SGD makes buffers only where no parameter of a group has one, and leaves them as
    the memory was where the scaler has that step skipped. From zeros the first step is the one
    without a buffer, bit for bit: momentum * 0 + gradient, where nothing is damped.
    """
    import torch

    # A closure makes the gradients later: whatever may get one is given a buffer.
    has_closure = any(callable(value) for value in (*args, *kwargs.values()))
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            gradient = parameter.grad
            if gradient is None and not (has_closure and parameter.requires_grad):
                continue
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                like = parameter.detach() if gradient is None else gradient
                state["momentum_buffer"] = torch.zeros_like(like)


def _save_plain(_optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Save groups of which some parameters have no momentum yet as plain ones.

    Where those get their first gradients in a script without flatout, torch's fused SGD fails.
    """
    groups = [
        group if _is_whole(group, saved["state"]) else {**group, "fused": None}
        for group in saved["param_groups"]
    ]
    return {**saved, "param_groups": groups}


def _is_whole(group: dict[str, Any], states: dict[Any, Any]) -> bool:
    buffers = [states.get(number, {}).get("momentum_buffer") for number in group["params"]]
    return not group["momentum"] or all(buffer is not None for buffer in buffers)


def find_obstacle(optimizer: "torch.optim.Optimizer") -> str | None:
    """Return why an optimizer cannot be fused now, or None."""
    found = next(_obstacles_of_kind(optimizer), None)
    # Adagrad makes its states when it is built.
    if found is None and any(_has_stepped(state) for state in optimizer.state.values()):
        return "it made a step or was loaded already: its state is laid out otherwise"
    return found or next(_obstacles_of_parameters(optimizer), None)


def _has_stepped(state: Any) -> bool:
    count = state.get("step")
    return count is None or float(count) > 0


def find_obstacle_while_running(optimizer: "torch.optim.Optimizer") -> str | None:
    """Return why an optimizer that has made steps cannot be switched, or None."""
    obstacles = chain(_obstacles_of_kind(optimizer), _obstacles_of_parameters(optimizer))
    return next(obstacles, None)


def _obstacles_of_kind(optimizer: Any) -> Iterator[str]:
    """Yield what is against it whatever it updates; the later ones need the earlier ones."""
    from flatout.agent.optimizer_swap import find_successor

    groups = optimizer.param_groups
    if any("fused" not in group for group in groups):
        yield "it has no fused implementation"
    is_fused = all(group["fused"] for group in groups)
    if is_fused and not optimizer.defaults["fused"] and len(optimizer.state) > 0:
        yield "its checkpoint is of fused steps, and it goes on with them on its own"
    # False is what most scripts write for "not on this device", as num_workers=0 is for loaders:
    # only what is switched on is taken for a choice.
    if any(group["fused"] or group.get("foreach") for group in groups):
        yield "the script chose its implementation itself"
    # A subclass with a step of its own may ignore the option, and would ignore the scaler's.
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        yield "it has a step of its own"
    # Its class may change as late as at the end of this step.
    if find_successor(optimizer) is not None:
        yield "another technique puts another optimizer in its place"
    # From a buffer of zeros the first momentum would be damped.
    if any(group.get("dampening") for group in groups):
        yield "dampening: a first momentum is not damped, in a fused step it may be"
    if any(group.get("differentiable") for group in groups):
        yield "differentiable steps cannot be fused"


def _has_fused_adagrad(key: str) -> bool:
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel("aten::_fused_adagrad_", key))


def _obstacles_of_parameters(optimizer: Any) -> Iterator[str]:
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        yield "the fused implementation does not take sparse gradients"
    if any(p.grad is not None and _strides(p.grad) != _strides(p) for p in parameters):
        yield "its gradients are stored otherwise than the parameters, and fused steps mix them up"
    if any(not p.is_floating_point() for p in parameters):
        yield "it has parameters that are not floating-point numbers"
    known = _get_fused_kernels_supported_devices()
    if isinstance(optimizer, torch.optim.Adagrad) and not _has_fused_adagrad("CUDA"):
        known = ["cpu"]  # of Adagrad not every release has the kernel for GPUs
    if any(p.device.type not in known for p in parameters):
        yield "it has parameters on a device without fused kernels"


def _strides(tensor: "torch.Tensor") -> list[int]:
    """Return the strides that matter: of a size of 1 any will do."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]


KOREAN = """
Update all parameters in one pass.
    모든 파라미터를 한 번에 갱신합니다.
the update makes no temporaries
    갱신할 때 임시 텐서를 만들지 않습니다
one pass instead of many over the parameters in {ms} ms
    {ms} ms 동안 파라미터를 여러 번 훑는 대신 한 번만 훑습니다
it made a step or was loaded already: its state is laid out otherwise
    이미 스텝을 했거나 불러온 것이라 상태의 배치가 다릅니다
it has no fused implementation
    옵티마이저에 fused 구현이 없습니다
its checkpoint is of fused steps, and it goes on with them on its own
    체크포인트가 fused 스텝의 것이라 옵티마이저가 스스로 fused로 이어 갑니다
another technique puts another optimizer in its place
    다른 기법이 이 옵티마이저를 다른 것으로 바꿉니다
dampening: a first momentum is not damped, in a fused step it may be
    dampening을 씁니다. 첫 모멘텀에는 적용하지 않아야 하는데 fused 스텝에서는 적용될 수 있습니다
differentiable steps cannot be fused
    미분 가능한 스텝은 fused로 할 수 없습니다
the fused implementation does not take sparse gradients
    fused 구현은 희소 그래디언트를 받지 않습니다
its gradients are stored otherwise than the parameters, and fused steps mix them up
    그래디언트가 파라미터와 다른 순서로 저장되어 있어 fused 스텝이 원소를 뒤섞습니다
it has parameters that are not floating-point numbers
    부동소수점이 아닌 파라미터가 있습니다
it has parameters on a device without fused kernels
    fused 커널이 없는 디바이스에 파라미터가 있습니다
{kind} cannot be fused: {why}
    {kind}은(는) fused로 바꿀 수 없습니다: {why}
"""
