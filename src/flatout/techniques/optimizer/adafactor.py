"""Keep rows and columns of the second moment instead of two moments per weight.

What it does: lets Adam or AdamW become torch's own Adafactor at its first step. Its rates are
multiplied so that a step is about as long as Adam's was.
When it helps: the optimizer's state does not fit, and 8-bit states are not to be had.
What it costs: no momentum, and another optimizer: it converges otherwise, at times slower.
How it is checked: for finite losses and gradients only; this changes the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis.stream_changes import FP32_BYTES, has_state, resized
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Allocation, Component, MemoryStream
from flatout.records.profile import Profile
from flatout.records.technique import Effect, MemoryOption, Numerics, Rescue, Technique
from flatout.techniques.memory_pressure import is_tight, state_bytes

if TYPE_CHECKING:
    import torch

ADAM_NAMES = ("Adam", "AdamW")
SAVED_SHARE = 0.95
"""Of Adam's state: a matrix of n x m keeps n + m numbers of 2nm. HF gives T5-3B 24 GB against some
12 GB with a first moment, which torch's Adafactor has not (published)."""
LEAST_SIZE = 1e-3
"""The size that a parameter is taken to have at least; torch's default."""
USUAL_SIZE = 0.03
"""Taken for parameters that start at zero, as biases do: that of a linear layer of a thousand
inputs. Of their own a rate would be made with which they grow without end: it is relative to what
they grow to."""
FACTOR = "flatout_rate_factor"
"""Where a group, and so a checkpoint, keeps what its rate is multiplied by.

From later weights it would be another number."""
SETTINGS = {"beta2_decay": -0.8, "d": 1.0, "eps": (None, LEAST_SIZE)}
"""Torch's defaults; the groups' own `eps` is Adam's."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(Technique):
    """Let Adam become Adafactor."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"out_of_memory"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    rescues: ClassVar[tuple[Rescue, ...]] = (
        Rescue(cost=0.02, instead_of=frozenset({"eight_bit_optimizer", "optimizer_in_backward"})),
    )
    by_hand: ClassVar[str] = """
Where the optimizer is made, with a rate that is relative to each tensor's size:
- optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
+ optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
"""

    keeps_step_length: bool = True
    """Multiply the script's rates so that steps are as long as Adam's; else they are taken as
    Adafactor means them, relative to each tensor's size."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["Adafactor"]:
        """Return the technique for Adam where memory is tight."""
        is_adam = any(optimizer.name in ADAM_NAMES for optimizer in profile.optimizers)
        return [cls()] if is_adam and is_tight(profile, machine) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="no first moment, a factored second; another optimizer",
                change=with_factored_states,
                helps=lambda stream, _: has_state(stream),
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect nearly all of the optimizer's state back."""
        return Effect(
            peak_bytes=-int(SAVED_SHARE * state_bytes(profile)),
            why="rows and columns instead of two moments",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Change the optimizer's class."""
        from flatout.agent.optimizer_swap import find_obstacle

        reason = find_obstacle(optimizer, "row_var", "variance")
        if reason is not None:
            raise NotApplicable(reason)
        to_adafactor(optimizer, keeps_step_length=self.keeps_step_length)
        return optimizer


def to_adafactor(
    optimizer: "torch.optim.Optimizer", *, keeps_step_length: bool = True
) -> "torch.optim.Optimizer":
    """Let an Adam become torch's Adafactor; call it before its first step.

    Its state_dict is that of `torch.optim.Adafactor` from then on. An Adam that was loaded from one
    goes on with it.
    """
    import torch

    from flatout.agent.optimizer_swap import become

    kind = torch.optim.Adafactor
    if keeps_step_length:
        rates = _Rates()
        become(optimizer, kind, SETTINGS, prepare=rates.multiply, finish=rates.restore)
    else:
        become(optimizer, kind, SETTINGS)
    return optimizer


class _Rates:
    """Multiplies the rates while a step runs: schedulers see and set their own.

    Weight decay is divided by as much: torch's Adafactor multiplies it by the rate.
    """

    def __init__(self) -> None:
        self.own: list[tuple[Any, Any]] = []

    def multiply(self, optimizer: Any, *_: Any) -> None:
        """Make the rates relative to the size of the group's tensors."""
        self.own = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if FACTOR not in group:
                group[FACTOR] = 1 / mean_size(group["params"])
            group["lr"] = group["lr"] * group[FACTOR]
            group["weight_decay"] = group["weight_decay"] / group[FACTOR]

    def restore(self, optimizer: Any, *_: Any) -> None:
        """Give the rates back."""
        for group, (rate, decay) in zip(optimizer.param_groups, self.own, strict=False):
            group["lr"], group["weight_decay"] = rate, decay
        self.own = []


def mean_size(parameters: "Sequence[torch.Tensor]") -> float:
    """Return the root mean square of all matrices of a group, as Adafactor sees each of them."""
    matrices = [p.detach() for p in parameters if p.dim() > 1] or [p.detach() for p in parameters]
    squares = sum(float(p.float().square().sum()) for p in matrices)
    count = sum(p.numel() for p in matrices)
    size = (squares / count) ** 0.5 if count else 1.0
    return size if size > LEAST_SIZE else USUAL_SIZE


def with_factored_states(stream: MemoryStream) -> MemoryStream:
    """No first moment, and of matrices only the sums of rows and columns of the second.

    The traced optimizer is taken to be one of Adam's kind: two states a parameter.
    """

    def size(allocation: Allocation) -> int:
        if len(allocation.shape) < 2:
            return allocation.size // 2
        *lead, rows, columns = allocation.shape
        return prod(lead) * (rows + columns) * FP32_BYTES // 2

    return resized(stream, Component.OPTIMIZER, size)


KOREAN = """
Let Adam become Adafactor.
    Adam을 Adafactor로 바꿉니다.
Where the optimizer is made, with a rate that is relative to each tensor's size:
    옵티마이저를 만드는 곳. 학습률은 각 텐서의 크기에 비례합니다:
no first moment, a factored second; another optimizer
    1차 모멘트를 없애고 2차 모멘트를 분해하므로 다른 옵티마이저가 됩니다
rows and columns instead of two moments
    모멘트 둘 대신 행과 열만 보관합니다
"""
