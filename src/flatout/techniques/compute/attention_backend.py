"""Let attention run on another of torch's fused kernels.

What it does: from the first training call on has one kernel for `scaled_dot_product_attention`
asked for first, and behind it torch's others in their own order.
When it helps: torch's own order is not the fastest for every GPU and head size: cuDNN's kernel on
Hopper was published at 1.1 to 1.6 times flash attention 2.
What it costs: nothing, where the kernel takes the shapes; else torch takes the next one.
How it is checked: losses and gradients match up to rounding. Dropout draws other masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from flatout.agent import patching
from flatout.agent.describe import is_compiled
from flatout.analysis.regime import COMPUTE_CAUSES, addressable_ms
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

Backend = Literal["flash", "efficient", "cudnn"]
SHARE = 0.15
"""Of forward and backward that is attention, where no trace tells: assumed."""
HOPPER = (9, 0)
MEMBERS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
SWITCHES = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp"}
COMPILED = "asked for in compiled code, in which no one sees what attention ran on"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend(Technique):
    """Ask for a kernel for attention."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "math_attention"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
Around the whole training, backward too, for cuDNN:
+ order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
+ with torch.nn.attention.sdpa_kernel(order, set_priority=True):
      train(model)
"""

    backend: Backend = "cudnn"
    """The kernel that is asked for first."""
    seen: list[tuple[str, str]] = process_state(list)
    """What the first attention ran on, and why where it is the slow one."""
    order: list[int] = process_state(list)
    """Torch's own order of kernels, while another one holds."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["AttentionBackend"]:
        """Return the kernels that may be faster than the one that ran on a GPU."""
        now = {m.attention_backend for m in profile.models}
        if profile.device_kind != "cuda" or not now & set(MEMBERS):
            return ()  # what runs on math is kept there by something a preference does not change
        found: list[Backend] = []
        if (machine.device.compute_capability or (0, 0)) >= HOPPER and "cudnn" not in now:
            found.append("cudnn")
        if "efficient" in now:
            found.append("flash")
        return [cls(backend=backend) for backend in found]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect attention's assumed part of forward and backward to shrink by its prior."""
        compute_ms = addressable_ms(profile, ("forward", "backward"), COMPUTE_CAUSES)
        return Effect(
            step_ms=-compute_ms * SHARE * (1 - 1 / prior_for(self, profile).speedup),
            why=f"attention on {self.backend}, some {SHARE:.0%} of forward and backward",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Ask for the kernel from the first training call on."""
        if not next(root.parameters()).is_cuda:
            raise NotApplicable("a CPU has one fused kernel, and torch takes it wherever it can")
        if is_compiled(root):
            self.seen.append((self.backend, COMPILED))
            return preferring(self.backend, call, self.order)
        return preferring(self.backend, noting(call, self.seen), self.order)

    def switch(self, training: RunningTraining) -> Switch:
        """Ask for the kernel, or leave torch's own order."""
        self.forward(lambda: None, training.roots[0])  # refuses where it cannot act
        own = self.order
        return Switch(turn=lambda on: _prefer(self.backend, own) if on else stop_preferring(own))

    def end(self) -> str:
        """Put torch's own order back and say what attention ran on."""
        stop_preferring(self.order)
        if not self.seen:
            raise NotApplicable("the model never called scaled_dot_product_attention")
        found, why = self.seen.pop()
        if found != self.backend:
            raise NotApplicable(f"attention ran on {found} all the same" + (f": {why}" * bool(why)))
        return why or f"attention ran on {found}"


def preferring(backend: Backend, call: Callable[..., Any], own: list[int]) -> Callable[..., Any]:
    """Return the call, whose first run lets attention prefer a kernel; the others stand behind.

    That holds for the whole process until `stop_preferring`: blocks that are checkpointed run again
    in backward, outside of any call, and must take the same kernel there. `own` keeps torch's own
    order meanwhile.
    """
    import torch

    if not getattr(torch.backends.cuda, f"{SWITCHES[backend]}_enabled")():
        raise NotApplicable(f"attention on {backend} is switched off")

    def first(*args: Any, **kwargs: Any) -> Any:
        _prefer(backend, own)
        return call(*args, **kwargs)

    return patching.at_first_call(call, first)


def noting(call: Callable[..., Any], seen: list[tuple[str, str]]) -> Callable[..., Any]:
    """Return the call, whose first run notes in `seen` what its first attention ran on.

    Not for compiled models: another operator for one step would compile them twice.
    """
    from torch.nn import functional

    from flatout.agent.measuring.attention import OPERATOR, backend_of, may_look

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(*given: Any, **named: Any) -> Any:
            if not seen and may_look():
                seen.append(_asked(backend_of, *given, **named))
            return original(*given, **named)

        return looked_at

    def noted(*args: Any, **kwargs: Any) -> Any:
        with patching.wrap(functional, OPERATOR, looking, order=patching.Order.TECHNIQUE):
            return call(*args, **kwargs)

    return patching.at_first_call(call, noted)


def stop_preferring(own: list[int]) -> None:
    """Let torch ask for its kernels in its own order again."""
    import torch

    if own:
        torch._C._set_sdp_priority_order([*own])
        own.clear()


def _prefer(backend: Backend, own: list[int]) -> None:
    """Change the order alone: what the script switched off or on stays so."""
    import torch
    from torch.nn.attention import SDPBackend

    wanted = int(getattr(SDPBackend, MEMBERS[backend]))
    order = torch._C._get_sdp_priority_order()
    if not own:
        own.extend(order)
    torch._C._set_sdp_priority_order([wanted, *(other for other in order if other != wanted)])


def _asked(backend_of: Callable[..., tuple[str, str]], *args: Any, **kwargs: Any) -> Any:
    try:
        return backend_of(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  a look must never end the training
        return "another", str(error)


KOREAN = """
Ask for a kernel for attention.
    어텐션에 쓸 커널을 지정합니다.
Around the whole training, backward too, for cuDNN:
    cuDNN을 쓰려면 역전파까지 포함한 학습 전체를 감쌉니다:
asked for in compiled code, in which no one sees what attention ran on
    컴파일된 코드 안에서 요청해, 어텐션이 어디에서 실행되었는지 볼 수 없습니다
attention on {backend}, some {share} of forward and backward
    순전파와 역전파의 약 {share}인 어텐션을 {backend}에서 실행합니다
a CPU has one fused kernel, and torch takes it wherever it can
    CPU에는 융합 커널이 하나뿐이고, torch가 쓸 수 있는 곳에서는 이미 그것을 씁니다
the model never called scaled_dot_product_attention
    모델이 scaled_dot_product_attention을 호출하지 않았습니다
attention ran on {found} all the same
    그래도 어텐션이 {found}에서 실행되었습니다
attention ran on {found} all the same: {why}
    그래도 어텐션이 {found}에서 실행되었습니다: {why}
attention ran on {found}
    어텐션이 {found}에서 실행되었습니다
attention on {backend} is switched off
    {backend} 어텐션이 꺼져 있습니다
"""
