"""One field of a batch as bytes on its way out of a worker, with what each level means."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from flatout.data.byte_batches import ring
from flatout.data.byte_batches.levels import LEVELS, Step, planes
from flatout.data.byte_batches.ring import sent

BLOCK = "_flatout_block"
"""On a tensor in a worker: its block of the ring; None where it has none."""
PROBE_REPEATS = 16
"""Times that the levels are laid side by side to try the arithmetic on them."""


def shared_bytes(shape: Sequence[int]) -> torch.Tensor:
    """Return memory for a batch: shared in a loader's worker, so that it need not be copied."""
    count = int(np.prod(shape))
    with torch._C.DisableTorchFunction():
        if torch.utils.data.get_worker_info() is None or not count:
            return torch.empty(tuple(shape), dtype=torch.uint8)
        memory, block = ring.borrow(count)
        view = memory.view(tuple(shape))
        view.__dict__[BLOCK] = block
        return view


class Packed:
    """Bytes, and the value of each of their levels per channel."""

    __slots__ = ("axis", "bytes", "held", "is_pinned", "levels", "steps")

    def __init__(
        self,
        values: torch.Tensor,
        levels: torch.Tensor,
        axis: int | None,
        steps: Sequence[Step] | None,
        held: ring.Held | None = None,
    ) -> None:
        self.bytes = values
        self.levels = levels
        self.axis = axis
        self.steps = steps
        self.held = held
        self.is_pinned = False
        """Whether the loader pins its batches."""

    def __reduce__(self) -> Any:
        # The levels are few: as plain bytes they need no shared memory of their own.
        kind = str(self.levels.dtype).removeprefix("torch.")
        raw = self.levels.contiguous().view(torch.uint8).numpy().tobytes()
        rows = tuple(self.levels.shape)
        block = self.bytes.__dict__.get(BLOCK)
        values = self.bytes if block is None else (*ring.send(block), tuple(self.bytes.shape))
        meaning = (self.axis, self.steps)
        return _unpickled, (values, raw, rows, kind, meaning)

    def pin_memory(self, device: Any = None) -> "Packed":
        """Return the same in page-locked memory; the loader's pinning thread asks for it."""
        pinned = self.bytes.pin_memory() if device is None else self.bytes.pin_memory(device)
        self.give_back()
        made = Packed(pinned, self.levels, self.axis, self.steps)
        made.is_pinned = True
        return made

    def give_back(self) -> None:
        """Tell the worker that its memory was read."""
        if self.held is not None:
            self.held.give_back()


def _unpickled(
    values: Any,
    raw: bytes,
    shape: Sequence[int],
    kind: str,
    meaning: tuple[int | None, Sequence[Step] | None],
) -> Packed:
    levels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, kind))
    held = None
    if not isinstance(values, torch.Tensor):
        owner, number, sent_memory, sides = values
        memory, held = ring.receive(owner, number, sent_memory, int(np.prod(sides)))
        values = memory.view(sides)
    axis, steps = meaning
    return Packed(values, levels.view(tuple(shape)), axis, steps, held)


def restored(packed: Packed, device: torch.device | None = None) -> torch.Tensor:
    """Return the tensor that the loop would have been given, to the bit.

    On the CPU the recorded arithmetic is done again, plane by plane, if it gives the same 256
    levels; else, and on a device, whose division may round differently, the levels are looked up.
    """
    try:
        if device is None or device.type == "cpu":
            return _computed(packed)
        # What is sent was copied to page-locked memory before this returns.
        return looked_up(sent(packed.bytes, device), sent(packed.levels, device), packed.axis)
    finally:
        packed.give_back()


def looked_up(values: torch.Tensor, levels: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return the value of each byte, on the device of the bytes.

    Args:
        values: uint8, any shape and strides.
        levels: 256 values, a row for each channel or one for all.
        axis: of the channels; None where all have the same values.

    >>> levels = torch.arange(256.0)[None] / 2
    >>> looked_up(torch.tensor([[4, 255]], dtype=torch.uint8), levels, None)
    tensor([[  2.0000, 127.5000]])
    """
    places = values.long()
    if axis is not None and len(levels) > 1:
        sides = [1] * values.dim()
        sides[axis] = -1
        places += (torch.arange(len(levels), device=values.device) * LEVELS).view(sides)
    return levels.reshape(-1)[places]


def _computed(packed: Packed) -> torch.Tensor:
    replay = find_replay(packed)
    if replay is None:
        found = looked_up(packed.bytes, packed.levels, packed.axis)
        return found.pin_memory() if packed.is_pinned else found
    values = packed.bytes.numpy()
    # Numpy's memory, because it asks for huge pages: ordinary ones cost as much as the arithmetic.
    made = torch.from_numpy(np.empty_like(values, dtype=packed.levels.numpy().dtype))
    if packed.is_pinned:
        form = made.shape, made.stride()
        made = torch.empty_strided(*form, dtype=made.dtype, device="cpu", pin_memory=True)
    pairs = zip(_blocks(values, packed.axis), _blocks(made.numpy(), packed.axis), strict=True)
    for (channel, source), (_, target) in pairs:
        replay(channel, source, target)
    return made


Replay: TypeAlias = Callable[[int, Any, Any], None]
"""Does the arithmetic for one channel: its number, the bytes, and where the values go."""


def find_replay(packed: Packed) -> Replay | None:
    """Return the recorded arithmetic; None where it would not give the very same levels."""
    if packed.steps is None or packed.levels.dtype not in (torch.float32, torch.float64):
        return None
    expected = packed.levels.numpy()
    rows = len(expected)
    # As long as a plane, so that the same vector instructions are taken as for one.
    probe = np.tile(np.arange(LEVELS, dtype=np.uint8), PROBE_REPEATS)
    found = np.empty((rows, probe.size), expected.dtype)
    fits = _which_fit(packed.steps, probe, expected.dtype)

    def replay(channel: int, source: Any, target: Any) -> None:
        value = source
        for (name, constant, is_turned), is_fitting in zip(packed.steps or (), fits, strict=True):
            out = target if is_fitting else None
            value = _step(name, _of_channel(constant, channel), is_turned, value, out)
        if value is not target:
            target[...] = value

    for channel in range(rows):
        replay(channel, probe, found[channel])
    is_same = found.tobytes() == np.tile(expected, PROBE_REPEATS).tobytes()
    return replay if is_same else None


def _which_fit(steps: Sequence[Step], probe: Any, dtype: "np.dtype[Any]") -> list[bool]:
    """Tell of each step whether its result has the type of the whole, so can be in its place."""
    value, fits = probe, []
    for name, constant, is_turned in steps:
        value = _step(name, _of_channel(constant, 0), is_turned, value, None)
        fits.append(value.dtype == dtype)
    return fits


def _of_channel(constant: Any, channel: int) -> Any:
    if not getattr(constant, "ndim", 0):
        return constant
    return constant[channel if len(constant) > 1 else 0]


def _step(name: str, constant: Any, is_turned: bool, value: Any, out: Any) -> Any:  # noqa: FBT001
    if name == "astype":
        if out is None:
            return value.astype(constant)
        out[...] = value
        return out
    pair = (constant, value) if is_turned else (value, constant)
    return getattr(np, name)(*pair, out=out)


def _blocks(values: Any, axis: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the channel and the values of parts that are small enough for a processor's cache."""
    if not axis:
        rows = planes(values, 0) if values.ndim > 2 else [values]
        yield from ((number if axis == 0 else 0, row) for number, row in enumerate(rows))
        return
    for sample in values:
        yield from enumerate(planes(sample, axis - 1))
