"""Sketches: 64 numbers that stand for a tensor when only differences are asked for.

`EarlySteps` keeps the gradients that backward uses up, for a guard that looks afterwards.
"""

import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.agent import events
from flatout.agent.guard.record import Numbers

if TYPE_CHECKING:
    import torch

SIZE = 64
"""Sums kept for each tensor. Estimated over true norm of a difference is 0.80-1.16 with 64 (1 to
99 %), 0.55-1.38 with 16; 16 missed a held-out mutant, 64 none (guard study, section 2.3)."""
CHUNK = 1 << 22
"""Elements handled at once: bounds the temporaries to a few times 16 MiB."""
SHIFTS = 1 << 16
"""Places in the block of signs where a tensor may start."""
WINDOWS = CHUNK // SHIFTS
"""Chunks after which the second signs repeat: in tensors of more than 2**28 elements only."""
SEED = 20261120


def sketch(tensor: "torch.Tensor", name: str) -> "torch.Tensor":
    """Return random-sign sums of a tensor in its logical order, in double precision on its device.

    Linear and unbiased: the squared norm of a difference of sketches estimates that of the
    tensors. Tensors of at most `SIZE` elements are kept whole. Memory format does not matter.
    """
    import torch

    with torch.no_grad():
        flat = _plain(tensor).reshape(-1)
        wide = _accumulator(flat)
        if flat.numel() <= SIZE:
            return flat.to(wide)
        sums = torch.zeros(SIZE, dtype=wide, device=flat.device)
        signs = _signs(str(flat.device))
        start = zlib.crc32(name.encode()) % SHIFTS
        for number in range(-(-flat.numel() // CHUNK)):
            chunk = flat[number * CHUNK : (number + 1) * CHUNK]
            signed = chunk * signs[start : start + chunk.numel()]
            rows = torch.nn.functional.pad(signed, (0, -signed.numel() % SIZE)).view(-1, SIZE)
            if number:  # the chunks share their signs: a second one for each row tells them apart
                first = number % WINDOWS * SHIFTS
                rows = rows * signs[first : first + len(rows), None]
            sums += rows.sum(0, dtype=wide)
        return sums


def buffer_sketch(tensor: "torch.Tensor", name: str) -> "torch.Tensor":
    """Return the sketch of a buffer, which may hold infinities on purpose (attention masks).

    They are counted in one more number and left out of the sums.
    """
    import torch

    plain = _plain(tensor)
    finite = torch.isfinite(plain)
    if bool(finite.all()):
        return sketch(plain, name)
    kept = sketch(torch.where(finite, plain, torch.zeros_like(plain)), name)
    return torch.cat([kept, (~finite).sum().to(kept).reshape(1)])


def to_numbers(sums: "torch.Tensor") -> Numbers:
    """Return a sketch as a plain array; waits for the device."""
    numbers: Numbers = sums.cpu().double().numpy()
    return numbers


def _plain(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a dense real tensor that multiplies by signs without loss."""
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_half else tensor.to(_accumulator(tensor))


def _accumulator(tensor: "torch.Tensor") -> "torch.dtype":
    import torch

    return torch.float32 if tensor.device.type == "mps" else torch.float64


@functools.cache
def _signs(device: str) -> "torch.Tensor":
    """Return the block of random signs that every tensor takes its own from."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(SEED)
    bits = torch.randint(
        0, 2, (CHUNK + SHIFTS,), generator=generator, dtype=torch.int8, device="cpu"
    )
    return (2 * bits - 1).to(device)


class EarlySteps:
    """Copies of each parameter and its gradient, taken just before backward updated it."""

    def __init__(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Take copies while they are wanted: they cost as much memory as the model."""
        self._is_wanted = is_wanted
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._updated: set[int] = set()

    def listen(self) -> None:
        """Begin to take copies."""
        events.listen(self._on_update)

    def gradient(self, parameter: "torch.nn.Parameter") -> "torch.Tensor | None":
        """Return the gradient of the step to come, used up or not."""
        if parameter.grad is None and id(parameter) in self._seen:
            return self._seen[id(parameter)][1]
        return parameter.grad

    def has_gradient(self, parameter: "torch.nn.Parameter") -> bool:
        """Return whether the step to come has a gradient for it, copied or not."""
        return parameter.grad is not None or id(parameter) in self._updated

    def before(self, parameter: "torch.nn.Parameter") -> "torch.Tensor":
        """Return what the parameter was before the step to come."""
        if id(parameter) in self._seen:
            return self._seen[id(parameter)][0]
        return parameter.detach()

    def forget(self) -> None:
        """Drop the copies: their step is over."""
        self._seen.clear()
        self._updated.clear()

    def _on_update(self, parameter: "torch.nn.Parameter") -> None:
        self._updated.add(id(parameter))
        if self._is_wanted() and parameter.grad is not None:
            self._seen[id(parameter)] = (
                parameter.detach().clone(),
                parameter.grad.detach().clone(),
            )
