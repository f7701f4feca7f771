"""Keep the optimizer's moments in 8 bits.

What it does: lets Adam or AdamW become torchao's 8-bit kind at its first step. A saved state is
written in full precision, and read back into 8 bits.
When it helps: the optimizer's state does not fit: it shrinks to a quarter.
What it costs: moments with two decimal digits; the optimizer is compiled at its first step.
How it is checked: for finite losses and gradients only; this changes the training.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent.hooks import optimizer as loaded_parts
from flatout.analysis.stream_changes import (
    FP32_BYTES,
    has_state,
    resized,
    without_optimizer_temporaries,
)
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Allocation, Component, MemoryStream
from flatout.records.profile import Profile
from flatout.records.technique import Effect, MemoryOption, Numerics, Rescue, Technique
from flatout.techniques.memory_pressure import is_tight, state_bytes

if TYPE_CHECKING:
    import torch

ADAM_NAMES = ("Adam", "AdamW")
SAVED_SHARE = 0.74
"""Of Adam's state: 8 bits of 32, and a scale for every 256. Small tensors stay as they are."""
SLOWER_SHARE = 0.09
"""Of the step: 3200 to 2900 tokens/s for Llama2-7B on an A100 (torchao, published)."""
OWN_BYTES = 75 * 10**6
"""Torchao and the compiler, in the process's own memory: the peak of a small GPT rose by 28 MB
where 44 MB of moments went (the record of techniques)."""
BLOCK = 256
"""Elements that share a scale, in bitsandbytes' optimizers too."""
MIN_ELEMENTS = 4096
"""Tensors below stay in full precision, as torchao and bitsandbytes have it."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""Names of the moments and whether they have a sign."""
STATE_KEY = "flatout_low_bits"
"""Where a checkpoint keeps the moments' codes and scales alongside the plain moments: packed again,
a block whose largest moment is negative would get another scale, as no code represents -1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EightBitOptimizer(Technique):
    """Keep Adam's moments in 8 bits."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(cost=0.0, instead_of=frozenset({"adafactor", "optimizer_in_backward"})),
    )
    extra: ClassVar[str] = "lowbit"
    by_hand: ClassVar[str] = """
Where the optimizer is made, with torchao installed:
- optimizer = torch.optim.AdamW(...)
+ optimizer = torchao.optim.AdamW8bit(...)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["EightBitOptimizer"]:
        """Return the technique for Adam where memory is tight.

        The process tells if torchao lacks.
        """
        is_adam = any(optimizer.name in ADAM_NAMES for optimizer in profile.optimizers)
        return [cls()] if is_adam and is_tight(profile, machine) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="optimizer state in one byte a number; another optimizer",
                change=with_states_in_bytes,
                helps=lambda stream, _: has_state(stream),
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect three quarters of the optimizer's state back."""
        own_bytes = OWN_BYTES if profile.device_kind == "cpu" else 0
        return Effect(
            step_ms=SLOWER_SHARE * profile.step_ms.median,
            peak_bytes=own_bytes - int(SAVED_SHARE * state_bytes(profile)),
            why="moments of 8 bits instead of 32",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Change the optimizer's class."""
        reason = find_obstacle(optimizer)
        if reason is not None:
            raise NotApplicable(reason)
        to_eight_bits(optimizer)
        return optimizer


def find_obstacle(optimizer: "torch.optim.Optimizer") -> str | None:
    """Return why the moments cannot be kept in 8 bits, or None."""
    from flatout.agent import optimizer_swap

    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install flatout[lowbit]"
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if not any(_is_packable(p) for p in parameters):
        return f"no parameter has {MIN_ELEMENTS} elements in whole blocks of {BLOCK}"
    return optimizer_swap.find_obstacle(optimizer, "exp_avg")


def to_eight_bits(optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
    """Let an Adam keep its moments in 8 bits; call it before its first step.

    Its state_dict stays that of the plain optimizer, both ways.
    """
    import torch
    import torchao.optim

    from flatout.agent.optimizer_swap import become

    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    state: Any = optimizer
    state.block_size, state.bf16_stochastic_round, state.is_adamw = BLOCK, False, is_adamw
    kind = torchao.optim.AdamW8bit if is_adamw else torchao.optim.Adam8bit
    moments, rates = _Moments(loaded_parts.find(optimizer, STATE_KEY)), _TensorRates()
    hooks = {"convert": moments.pack, "prepare": rates.to_tensors, "finish": rates.restore}
    become(optimizer, kind, {}, **hooks)
    optimizer.register_state_dict_post_hook(_plain)
    optimizer.register_load_state_dict_pre_hook(moments.note)
    optimizer.register_load_state_dict_post_hook(moments.pack)
    return optimizer


def _is_packable(parameter: "torch.Tensor") -> bool:
    return parameter.numel() >= MIN_ELEMENTS and parameter.numel() % BLOCK == 0


class _TensorRates:
    """Makes tensors of rates while a step runs: torchao compiles for each number.

    Scripts log them, and write them to files that know no tensors.
    """

    def __init__(self) -> None:
        self.own: list[Any] = []

    def to_tensors(self, optimizer: Any, *_: Any) -> None:
        """Make tensors of those that are numbers."""
        import torch

        self.own = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)

    def restore(self, optimizer: Any, *_: Any) -> None:
        """Give the rates back."""
        for group, rate in zip(optimizer.param_groups, self.own, strict=False):
            group["lr"] = rate
        self.own = []


def _plain(_optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state as the plain optimizer has it, and what the moments are here."""
    return {
        **state_dict,
        "state": {
            number: {name: _unpacked(value) for name, value in state.items()}
            for number, state in state_dict["state"].items()
        },
        "param_groups": [
            {**group, "lr": float(group["lr"])} for group in state_dict["param_groups"]
        ],
        STATE_KEY: {
            number: {
                name: (value.codes.clone(), value.scale.clone())
                for name, value in state.items()
                if hasattr(value, "codes")
            }
            for number, state in state_dict["state"].items()
        },
    }


def _unpacked(value: Any) -> Any:
    return value.dequantize(value.dtype) if hasattr(value, "codes") else value


class _Moments:
    """Puts loaded moments into 8 bits again."""

    def __init__(self, loaded: dict[int, Any] | None) -> None:
        self.loaded = loaded or {}
        """By the parameter's number in the checkpoint the codes and scales of each moment."""

    def note(self, _: Any, state: dict[str, Any]) -> None:
        """Take them out of a checkpoint; one of a plain optimizer has none."""
        self.loaded = state.get(STATE_KEY) or {}

    def pack(self, optimizer: Any) -> None:
        """Replace plain moments by packed ones, by those of the checkpoint where it has them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            exact = self.loaded.get(number, {})
            for name in MOMENTS.keys() & state.keys():
                is_plain = not hasattr(state[name], "codes")
                if is_plain and _is_packable(parameter):
                    buffer = optimizer._new_buffer(parameter, MOMENTS[name])
                    state[name] = _filled(buffer, state[name], exact.get(name))
        self.loaded = {}


def _filled(buffer: Any, moment: "torch.Tensor", exact: "Sequence[torch.Tensor] | None") -> Any:
    """Return the packed moment with what the plain one says, or exactly what it was."""
    parts = (buffer.codes, buffer.scale)
    if exact is None:
        buffer.copy_(moment.contiguous())
        return buffer
    for part, one in zip(parts, exact, strict=True):
        part.copy_(one)
    return buffer


def with_states_in_bytes(stream: MemoryStream) -> MemoryStream:
    """One byte a number and one scale for 256 of them instead of fp32, and a fused update."""

    def size(allocation: Allocation) -> int:
        count = allocation.size // FP32_BYTES
        if allocation.dtype not in ("float32", "") or count < MIN_ELEMENTS:
            return allocation.size
        return count + -(-count // BLOCK) * FP32_BYTES

    return resized(without_optimizer_temporaries(stream), Component.OPTIMIZER, size)


KOREAN = """
Keep Adam's moments in 8 bits.
    Adam의 모멘트를 8비트로 둡니다.
optimizer state in one byte a number; another optimizer
    옵티마이저 상태를 값마다 1바이트로 두므로 다른 옵티마이저가 됩니다
moments of 8 bits instead of 32
    모멘트를 32비트 대신 8비트로 둡니다
torchao is not installed: pip install flatout[lowbit]
    torchao가 설치되어 있지 않습니다: pip install flatout[lowbit]
no parameter has {n} elements in whole blocks of {block}
    원소가 {n}개 이상이고 {block}개짜리 블록으로 나누어떨어지는 파라미터가 없습니다
"""
