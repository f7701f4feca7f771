"""Let copies to the GPU leave the training thread free.

What it does: `tensor.to(device)` and `tensor.cuda()` copy a tensor of the host into page-locked
memory of their own and from there to the GPU, without waiting for it.
When it helps: a script that copies its batches without `non_blocking=True`: at each of them it
waits until the GPU has done all the work before, and then the GPU waits for new work.
What it costs: page-locked host memory for the batches in flight, and a copy on the host.
How it is checked: bit by bit: the GPU gets what the tensor held at the call.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent import patching
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    process_state,
)
from flatout.records.units import MIB

if TYPE_CHECKING:
    import torch

DRAINED_MS, DRAINED_SHARE = 4.0, 0.1
"""What a step loses from when the host goes on after a copy until it is ahead of the GPU again: 4
to 7 of 50 ms for a GPT-2 of 12 layers that is not compiled, on an H200 (measured); of a shorter
step no larger share (assumed)."""
MOST_BYTES = 512 * MIB
"""Of a tensor: a whole data set that is copied once is no batch, and stays pageable."""
WAITS_SAVED = 0.5
"""Of the time that the GPU waits for launches: assumed, as other waits remain."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCopies(Technique):
    """Copy to the GPU without waiting for it."""

    addresses: ClassVar[frozenset[str]] = frozenset({"h2d", "forward", "other"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
Where batches go to the device:
- x = x.to(device)
+ x = x.pin_memory().to(device, non_blocking=True)
"""

    copied: list[int] = process_state(list)
    """Tensors that were copied so, as one number."""
    undo: list[Callable[[], None]] = process_state(list)
    """What gives torch its own methods back."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["AsyncCopies"]:
        """Return the technique where batches are copied to a GPU from pageable memory."""
        is_copied = profile.device_kind == "cuda" and bool(profile.phases_ms.get("h2d"))
        is_pageable = any(not loader.pin_memory for loader in profile.training_loaders)
        return [cls()] if is_copied and is_pageable else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the copies to be hidden, and a part of the waits for launches after them."""
        copies_ms = profile.phases_ms["h2d"]
        drained_ms = min(DRAINED_MS, DRAINED_SHARE * profile.step_ms.median)
        waits_ms = max(drained_ms, WAITS_SAVED * launch_ms(profile))
        return Effect(
            step_ms=-copies_ms - waits_ms,
            why=f"{copies_ms:.1f} ms of copies, after which the GPU waits {waits_ms:.1f} ms",
        )

    def start(self) -> None:
        """Replace torch's methods before the script runs."""
        self.undo.extend(install(self.copied))

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between torch's methods and these, last: in the shortest steps it shows most."""
        if not next(training.roots[0].parameters()).is_cuda:
            raise NotApplicable(NO_GPU)

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            if is_on:
                self.start()
            while self.undo and not is_on:
                self.undo.pop()()

        return Switch(turn=turn, check=self._check, is_last=True)

    def end(self) -> str:
        """Give torch its own methods back; say how many tensors were copied so."""
        while self.undo:
            self.undo.pop()()
        self._check()
        return f"{sum(self.copied)} tensors copied without waiting"

    def _check(self) -> None:
        if not self.copied:
            raise NotApplicable("no tensor of the host was copied to a GPU with to or cuda")


NO_GPU = "the model is on no GPU"


def launch_ms(profile: Profile) -> float:
    """Return for how long of a step the GPU waits for launches; 0 where no one looked."""
    share = profile.regime.shares.get("launch", 0.0) if profile.regime else 0.0
    return share * profile.step_ms.median


def install(copied: list[int]) -> list[Callable[[], None]]:
    """Let tensors be copied to GPUs without waiting; return what takes that back.

    Args:
        copied: Gets the number of tensors that were, as its only entry.
    """
    import torch

    def target_of_to(args: Any, kwargs: Any) -> Any:
        device, dtype, is_asked, _ = torch._C._nn._parse_to(*args, **kwargs)
        return None if is_asked or dtype is not None else device

    def target_of_cuda(args: Any, kwargs: Any) -> Any:
        given = dict(zip(("device", "non_blocking", "memory_format"), args, strict=False)) | kwargs
        if given.get("non_blocking") or given.get("memory_format"):
            return None
        device = given.get("device", "cuda")
        if device is None:
            return torch.device("cuda")
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    return [
        patching.wrap(
            torch.Tensor,
            name,
            functools.partial(_without_waiting, find_target=find_target, copied=copied),
            order=patching.Order.TECHNIQUE,
        ).undo
        for name, find_target in (("to", target_of_to), ("cuda", target_of_cuda))
    ]


def _without_waiting(
    original: Callable[..., Any], *, find_target: Callable[[Any, Any], Any], copied: list[int]
) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def copy(self: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
        if not _is_of_a_batch(self) or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        try:
            target = find_target(args, kwargs)
        except (RuntimeError, TypeError):  # another form of the call: like another tensor, a type
            target = None
        if getattr(target, "type", None) != "cuda":
            return original(self, *args, **kwargs)
        # Never the tensor itself, page-locked or not: the script may fill it again at once.
        staged = torch.empty_like(self, pin_memory=True).copy_(self)
        copied[:] = [sum(copied) + 1]
        return original(staged, target, non_blocking=True)

    return copy


def _is_of_a_batch(tensor: "torch.Tensor") -> bool:
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout == torch.strided
        and 0 < tensor.numel() * tensor.element_size() <= MOST_BYTES
    )


KOREAN = """
Copy to the GPU without waiting for it.
    끝나기를 기다리지 않고 GPU로 복사합니다.
Where batches go to the device:
    배치를 디바이스로 보내는 곳:
{ms} ms of copies, after which the GPU waits {waits} ms
    복사 {ms} ms와, 그 뒤에 GPU가 기다리는 {waits} ms
the model is on no GPU
    모델이 GPU에 있지 않습니다
{n} tensors copied without waiting
    텐서 {n}개를 기다리지 않고 복사했습니다
no tensor of the host was copied to a GPU with to or cuda
    to나 cuda로 GPU에 복사된 호스트 텐서가 없습니다
"""
