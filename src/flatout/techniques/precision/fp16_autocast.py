"""Compute matrix products and convolutions in fp16 with scaled losses, keep the weights in fp32.

What it does: runs each training call of the root module under `torch.autocast` with float16, casts
its outputs back to fp32, and scales every loss so that small gradients do not vanish. Gradients
are unscaled before the script sees them; a step whose gradients overflowed changes nothing.
When it helps: NVIDIA devices that multiply fp16 in hardware and bf16 not: Volta and Turing.
What it costs: a pass over the gradients, one read of a flag per step, a skipped step now and then.
How it is checked: losses and gradients stay inside the guard's band for lower precision.
"""

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

from flatout.agent import patching
from flatout.agent.training_device import live_optimizers
from flatout.analysis.regime import lowered_ms
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, prior_for, process_state
from flatout.techniques.precision.bf16_autocast import (
    autocast_to,
    check_root,
    emulated,
    is_plain_fp32,
)

if TYPE_CHECKING:
    import torch

Output = TypeVar("Output")

CPU_SLOWDOWN = 17.0
"""Kernels of forward and backward on a CPU without fp16 units: 128 ms became 2.2 s for a small
language model on two cores (the record of levers_text)."""
FIRST_CAPABILITY, BF16_CAPABILITY = (7, 0), (8, 0)
"""Compute capabilities from which NVIDIA devices multiply fp16, and bf16, in hardware."""
DEFAULT_SCALE = 2**13
"""Eight times below GradScaler's first scale, which loses the first steps of many trainings."""
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale doubles: GradScaler's."""
MAX_SCALE = 2.0**24
"""Beyond it, the smallest gradients of fp16 are kept anyway."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Autocast(Technique):
    """Run the model's training calls under fp16 autocast with scaled losses."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.PRECISION
    by_hand: ClassVar[str] = """
Before the loop, and in each step:
+ scaler = torch.amp.GradScaler(...)
+ with torch.autocast(device_type=..., dtype=torch.float16):
+     output = model(...)
+ scaler.scale(loss).backward()
+ scaler.unscale_(optimizer)
Clip the gradients here, then:
+ scaler.step(optimizer)
+ scaler.update()
Step the scheduler only where the scale did not fall.
"""

    initial_scale: int = DEFAULT_SCALE
    """Factor of the first losses, a power of two; it adapts."""
    lowered: list[Any] = process_state(list)
    """Weak references to the roots between their first call and the backward after it."""
    scalings: "list[LossScaling]" = process_state(list)

    def __post_init__(self) -> None:
        if self.initial_scale < 1 or self.initial_scale & (self.initial_scale - 1):
            raise ValueError(f"initial_scale={self.initial_scale} is no power of two; try 8192")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Fp16Autocast"]:
        """Return the technique for an fp32 model on a device with fast fp16 and no fast bf16."""
        capability = machine.device.compute_capability
        if profile.device_kind != "cuda" or capability is None:
            return ()
        if not FIRST_CAPABILITY <= capability < BF16_CAPABILITY:
            return ()
        return [cls()] if any(is_plain_fp32(model) for model in profile.models) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the kernels to shrink by its prior, if the device multiplies fp16."""
        if lacks_fp16(profile, machine):
            return emulated(profile, "fp16", CPU_SLOWDOWN)
        compute_ms = lowered_ms(profile)
        speedup = prior_for(self, profile).speedup
        return Effect(
            step_ms=-compute_ms * (1 - 1 / speedup),
            why=f"kernels in forward and backward, {compute_ms:.1f} ms, {speedup:.1f} times faster",
        )

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Put the call under autocast, unless the script chose a precision itself."""
        device_type = check_root(root)
        if any(hasattr(p, "to_local") for p in root.parameters()):
            raise NotApplicable("sharded parameters: each rank would skip steps on its own")
        if any(p._backward_hooks for p in root.parameters()):
            raise NotApplicable("the script's hooks on gradients would be given scaled ones")
        self.lowered.append(weakref.ref(root))
        lowered = autocast_fp16(call, device_type)

        @functools.wraps(call)
        def call_lowered(*args: Any, **kwargs: Any) -> Any:
            is_given_up = any(scaling.is_given_up for scaling in self.scalings)
            return (call if is_given_up else lowered)(*args, **kwargs)

        return call_lowered

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Scale the losses of the models whose calls were lowered."""
        from flatout.agent import optimizer_swap

        if not self.lowered:
            raise NotApplicable("no model was put under fp16 autocast before the first backward")
        optimizer_swap.need_all("fp16_autocast, which skips steps whose gradients overflowed,")
        roots = [root for reference in self.lowered if (root := reference()) is not None]
        self.lowered.clear()
        self.scalings.append(LossScaling(self.initial_scale, self.lowered))
        return self.scalings[-1].install(call, roots)

    def end(self) -> str:
        """Return how many steps changed nothing."""
        skipped = sum(scaling.skipped for scaling in self.scalings)
        if any(scaling.is_given_up for scaling in self.scalings):
            raise NotApplicable(
                f"gradients overflow in fp16 unscaled too: it was given up after {skipped} steps "
                "that changed nothing"
            )
        return f"gradients overflowed in {skipped} steps, which changed nothing" if skipped else ""


def lacks_fp16(profile: Profile, machine: Machine) -> bool:
    """Return whether the device that trained is known to have no fp16 in hardware."""
    if profile.device_kind == "cpu":
        return not machine.has_fast_cpu_fp16
    capability = machine.device.compute_capability
    return capability is not None and capability < FIRST_CAPABILITY


def autocast_fp16(call: Callable[..., Output], device_type: str) -> Callable[..., Output]:
    """Return the call under fp16 autocast, its fp16 outputs cast back to fp32."""
    import torch

    return autocast_to(torch.float16, call, device_type)


class LossScaling:
    """Scales losses at `backward` so that the script sees plain gradients and finite updates only.

    Unlike `torch.amp.GradScaler`, which a script has to call in five places, it unscales as soon as
    a backward has ended: clipping, logging and accumulation see the gradients they expect.
    """

    def __init__(self, scale: float = DEFAULT_SCALE, later: list[Any] | None = None) -> None:
        self.scale = float(scale)
        self.later: list[Any] = [] if later is None else later
        """Weak references to models that the next backward may be the first one of."""
        self.skipped = 0
        """Steps that changed nothing because their gradients had overflowed."""
        self.is_given_up = False
        """Whether they did at a scale of 1: the training goes on in fp32."""
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._walks = 0
        self._groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """By optimizer how many groups it had in the last backward."""
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a step that is skipped must not see."""
        self._is_spent = True
        self._depth = 0
        self._clean_steps = 0
        self._held: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(
        self, backward: Callable[..., Any], roots: "Iterable[torch.nn.Module]" = ()
    ) -> Callable[..., Any]:
        """Watch all optimizers and schedulers; return what to run in place of the backward."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._know(p for root in roots for p in root.parameters())
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for kind in _scheduler_kinds():
            patching.wrap(kind, "step", self._holding, order=patching.Order.TECHNIQUE)
        return self.around(backward)

    def around(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward with its losses scaled and its gradients unscaled."""
        signature = inspect.signature(backward)

        @functools.wraps(backward)
        def scaled(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            # The gradients of one that creates a graph are differentiated again.
            if given.arguments.get("create_graph") or self.is_given_up:
                return backward(*args, **kwargs)
            tensors = given.arguments["tensors"]
            many = (tensors,) if hasattr(tensors, "grad_fn") else tuple(tensors)
            self._begin(many)
            given.arguments["tensors"] = many
            given.arguments["grad_tensors"] = self._seeds(many, given.arguments)
            try:
                return backward(*given.args, **given.kwargs)
            finally:
                self._unscale()

        return scaled

    def _begin(self, tensors: "tuple[torch.Tensor, ...]") -> None:
        import torch

        if self._is_spent:
            self._flags = {}
            self._is_spent = False
        for gradients in _grouped(self._parameters()).values():
            # Exact, as the scale is a power of two: what was accumulated before joins the scaled.
            torch._foreach_mul_(gradients, self.scale)
        # After that: what is met only now got its gradients, if any, from scaled losses.
        while self.later:
            root = self.later.pop()()
            self._know(() if root is None else root.parameters())
        if self._has_new_groups():
            self._walks = 0
        if self._walks < MAX_WALKS:
            self._walks += 1
            self._know(leaves_of(tensors))

    def _seeds(self, tensors: "tuple[torch.Tensor, ...]", given: dict[str, Any]) -> list[Any]:
        import torch

        seeds = given.get("grad_tensors")
        if seeds is None:
            return [torch.full_like(tensor, self.scale) for tensor in tensors]
        many = [seeds] if isinstance(seeds, torch.Tensor) else list(seeds)
        return [
            torch.full_like(tensor, self.scale) if seed is None else seed * self.scale
            for tensor, seed in zip(tensors, many, strict=True)
        ]

    def _unscale(self) -> None:
        self._unscale_those(self._parameters())
        if self._depth and self._has_overflown():
            # A closure inside a step: its optimizer reads the gradients next.
            _drop(self._parameters())

    def _unscale_those(self, parameters: "Iterable[torch.Tensor]") -> None:
        import torch

        for (device, _), gradients in _grouped(parameters).items():
            if device not in self._flags:
                self._flags[device] = torch.zeros((), device=device)
            inverse = torch.full((), 1 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, self._flags[device], inverse
            )

    def _has_overflown(self) -> bool:
        return any(bool(flag.item()) for flag in self._flags.values())

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self.is_given_up:
            return
        own = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = [p for p in own if p.grad is not None and not self._knows(p)]
        if unknown:
            self._unscale_those(unknown)
            self._know(unknown)
        is_skipped = self._has_overflown()
        if is_skipped:
            self._aside = [(p, p.grad) for p in own if p.grad is not None]
            _drop(own)
        if not self._is_spent:
            self._adapt(is_skipped=is_skipped)
        self._is_spent = True
        steps = self._held.get(optimizer, (0, False))[0]
        self._held[optimizer] = steps + 1, is_skipped

    def _after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            # A script may look at them, or fill them with zeros itself.
            for parameter, gradient in self._aside:
                parameter.grad = gradient.zero_()
            self._aside = []

    def _adapt(self, *, is_skipped: bool) -> None:
        if is_skipped:
            self.skipped += 1
            self.is_given_up = self.scale <= 1
            self.scale, self._clean_steps = max(1.0, self.scale / 2), 0
            return
        self._clean_steps += 1
        if self._clean_steps >= GROWTH_INTERVAL:
            self.scale, self._clean_steps = min(MAX_SCALE, 2 * self.scale), 0

    def _has_new_groups(self) -> bool:
        """Return whether an optimizer was given parameters.

        Maybe a model's that no walk has met.
        """
        live = {optimizer: len(optimizer.param_groups) for optimizer in live_optimizers()}
        is_new = any(self._groups.get(optimizer) != count for optimizer, count in live.items())
        self._groups.update(live)
        return is_new

    def _holding(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a scheduler's step that does nothing after a step that was skipped.

        Only for a scheduler that steps after every optimizer step: one that steps once an epoch
        goes on whatever the epoch's last step was.
        """

        @functools.wraps(step)
        def hold(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(scheduler, "optimizer", None)
            known = self._held.get(optimizer) if optimizer is not None else None
            steps, is_skipped = known or (0, False)
            since, self._seen[scheduler] = steps - self._seen.get(scheduler, 0), steps
            return None if is_skipped and since == 1 else step(scheduler, *args, **kwargs)

        return hold

    def _know(self, leaves: "Iterable[torch.Tensor]") -> None:
        self._leaves |= {id(p): weakref.ref(p) for p in leaves if p.requires_grad}

    def _knows(self, parameter: "torch.Tensor") -> bool:
        reference = self._leaves.get(id(parameter))
        # What is gone leaves its address to others.
        return reference is not None and reference() is parameter

    def _parameters(self) -> "Iterator[torch.Tensor]":
        return (p for reference in self._leaves.values() if (p := reference()) is not None)


MAX_WALKS = 3
"""Backwards whose graph is searched for leaves outside the model, again whenever an optimizer is
given parameters; a later one is met at its optimizer's step."""


def leaves_of(tensors: "Iterable[torch.Tensor]") -> "Iterator[torch.Tensor]":
    """Yield the leaf tensors that a backward from these tensors accumulates gradients into."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]


def _grouped(
    parameters: "Iterable[torch.Tensor]",
) -> "dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]":
    """Return the gradients by device and dtype; of sparse ones the values."""
    groups = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not gradient.is_floating_point():
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        groups[gradient.device, gradient.dtype].append(gradient)
    return groups


def _drop(parameters: "Iterable[torch.Tensor]") -> None:
    """Take the gradients away: every optimizer of torch leaves such parameters as they are."""
    for parameter in parameters:
        parameter.grad = None


def _scheduler_kinds() -> list[Any]:
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    own = [k for k in vars(lr_scheduler).values() if isinstance(k, type) and issubclass(k, base)]
    return [kind for kind in {*own} if "step" in vars(kind)]


KOREAN = """
Run the model's training calls under fp16 autocast with scaled losses.
    모델의 학습 호출을 손실 스케일링과 함께 fp16 autocast로 실행합니다.
Before the loop, and in each step:
    루프 앞에서, 그리고 스텝마다:
Clip the gradients here, then:
    그래디언트 클리핑은 여기서 하고, 그다음:
Step the scheduler only where the scale did not fall.
    스케일이 줄지 않은 스텝에서만 스케줄러를 진행합니다.
no model was put under fp16 autocast before the first backward
    첫 backward 전에 fp16 autocast로 실행된 모델이 없습니다
fp16_autocast, which skips steps whose gradients overflowed,
    그래디언트가 오버플로한 스텝을 건너뛰는 fp16_autocast
sharded parameters: each rank would skip steps on its own
    파라미터가 샤딩되어 있어 랭크마다 따로 스텝을 건너뛰게 됩니다
gradients overflow in fp16 unscaled too: it was given up after {n} steps that changed nothing
    그래디언트가 스케일 없이도 fp16에서 오버플로해, 아무것도 바꾸지 못한 {n}스텝 뒤에 fp32로
    돌아갔습니다
gradients overflowed in {n} steps, which changed nothing
    {n}스텝에서 그래디언트가 오버플로해 그 스텝들은 아무것도 바꾸지 않았습니다
the script's hooks on gradients would be given scaled ones
    스크립트가 그래디언트에 건 훅이 스케일된 그래디언트를 받게 됩니다
initial_scale={scale} is no power of two; try 8192
    initial_scale={scale}은(는) 2의 거듭제곱이 아닙니다. 8192를 써 보세요
"""
