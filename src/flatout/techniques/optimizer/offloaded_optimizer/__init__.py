"""Keep the optimizer's state in the host's memory and make its steps there.

What it does: before each step copies gradients and parameters into pinned memory, lets the
optimizer itself step on those copies, and sends the parameters back.
When it helps: the optimizer's state does not fit on the device, and the host has room for it.
What it costs: gradients travel in each step, parameters both ways; the host's memory is slower.
How it is checked: the same optimizer on another device: losses match up to rounding. The state_dict
keeps its form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.parallel.cost import HOST_BYTES_PER_S, HOST_PASSES
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Rescue, Technique
from flatout.techniques.memory_pressure import is_tight, parameter_bytes, state_bytes

if TYPE_CHECKING:
    import torch

TRAVELS = 3
"""Times that the parameters' size crosses the link: gradients and parameters there, parameters
back."""
LINK_BYTES_PER_S = 25e9
"""Of PCIe 4.0 with 16 lanes, as copies reach it: assumed; a newer link is faster."""
HOST_SHARE = 0.5
"""Of the host's memory that copies and state may take together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedOptimizer(Technique):
    """Step on the host."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(
            cost=1.0,
            needs_device=True,
            instead_of=frozenset({"adafactor", "eight_bit_optimizer", "optimizer_in_backward"}),
        ),
    )
    by_hand: ClassVar[str] = """
Where the optimizer is made, with torchao installed:
- optimizer = torch.optim.AdamW(model.parameters(), lr=...)
+ optimizer = torchao.optim.CPUOffloadOptimizer(
+     model.parameters(), torch.optim.AdamW, fused=True, lr=...)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["OffloadedOptimizer"]:
        """Return the technique where a GPU's memory is tight and the host has room."""
        held = 2 * parameter_bytes(profile) + state_bytes(profile)
        has_room = 0 < held <= HOST_SHARE * machine.memory_bytes
        is_worth = profile.device_kind == "cuda" and state_bytes(profile) > 0
        return [cls()] if is_worth and has_room and is_tight(profile, machine) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the state's memory back, for copies both ways and a step on the host."""
        size = parameter_bytes(profile)
        travel_s = TRAVELS * size / LINK_BYTES_PER_S
        step_s = HOST_PASSES * size / HOST_BYTES_PER_S
        return Effect(
            step_ms=1e3 * (travel_s + step_s),
            peak_bytes=-state_bytes(profile),
            why="the optimizer's state in the host's memory",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Let the optimizer step on the host."""
        from flatout.agent import optimizer_swap
        from flatout.techniques.optimizer.offloaded_optimizer.host_steps import find_obstacle

        if not any(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
            raise NotApplicable("the parameters are in the host's memory already")
        reason = find_obstacle(optimizer)
        if reason is not None:
            raise NotApplicable(reason)
        optimizer_swap.need(optimizer, "offloaded_optimizer, which makes each step on the host,")
        step_on_host(optimizer)
        return optimizer


def step_on_host(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let an optimizer make its steps on the host; its state_dict goes in and out as before."""
    from flatout.techniques.optimizer.offloaded_optimizer.host_steps import HostSteps

    HostSteps(optimizer)
    return optimizer


KOREAN = """
Step on the host.
    옵티마이저 스텝을 호스트에서 합니다.
the optimizer's state in the host's memory
    옵티마이저 상태를 호스트 메모리에 둡니다
the parameters are in the host's memory already
    파라미터가 이미 호스트 메모리에 있습니다
offloaded_optimizer, which makes each step on the host,
    스텝을 호스트에서 하는 offloaded_optimizer
"""
