"""Shared memory for batches that goes back and forth between a worker and the training process.

A loader's worker allocates shared memory for every batch, and the kernel clears and maps each page
of it anew: 0.15 ms for an image of 0.15 MB, more than writing it. Here a worker keeps a few blocks;
one byte at the end of each tells whether the training process is done with it. A block is sent
once, then only named. All of it is anonymous and goes with its processes.
"""

import os
import weakref
from typing import Any

import torch

MAX_BLOCKS = 64
"""Blocks of one worker at most: what it sends beyond that is not used again."""
SMALLEST = 4096
FREE, BUSY = 0, 1

_OURS: list["Block"] = []
"""In a worker: its blocks."""
_THEIRS: dict[tuple[int, int], torch.Tensor] = {}
"""In the training process: the memory behind a worker's process id and a block's number."""


class Block:
    """One block of a worker's."""

    __slots__ = ("is_out", "is_sent", "lease", "memory", "number", "owner")

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        self.memory = memory
        self.number = number
        self.owner = os.getpid()
        self.is_sent = False
        """Whether the training process has the memory and needs only its name."""
        self.is_out = False
        """Whether it is on its way there, or in use there."""
        self.lease: Any = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether nobody uses it: given back, or its batch was never sent and is gone."""
        if self.is_out:
            return int(self.memory[-1]) == FREE
        return self.lease() is None


class Held:
    """A block in use in the training process; given back when it is let go."""

    __slots__ = ("memory",)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor | None = memory

    def give_back(self) -> None:
        """Let the worker write to it again."""
        if self.memory is not None:
            self.memory[-1] = FREE
            self.memory = None

    def __del__(self) -> None:
        self.give_back()


def new_shared(count: int) -> torch.Tensor:
    """Return bytes in shared memory."""
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def borrow(count: int) -> tuple[torch.Tensor, Block | None]:
    """Return shared memory for so many bytes, and its block: None where it cannot be kept."""
    if _OURS and _OURS[0].owner != os.getpid():
        _OURS.clear()  # forked off a process that had some
    size = room_for(count + 1)
    block = next((x for x in _OURS if x.memory.numel() == size and x.is_free), None)
    if block is None:
        if len(_OURS) == MAX_BLOCKS:
            return new_shared(count), None
        block = Block(new_shared(size), len(_OURS))
        _OURS.append(block)
    view = block.memory[:count]
    block.is_out, block.lease = False, weakref.ref(view)
    return view, block


def room_for(count: int) -> int:
    """Return the size of a block for so many bytes: an eighth more at most.

    Batches of windows differ in size; what is not written to takes no memory.

    >>> room_for(3), room_for(9_633_793), room_for(9_633_000)
    (4096, 10485760, 10485760)
    """
    step = max(SMALLEST, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def send(block: Block) -> tuple[int, int, torch.Tensor | None]:
    """Return what names the block to the training process; called when a batch is pickled."""
    memory = None if block.is_sent else block.memory
    block.memory[-1] = BUSY
    block.is_out = block.is_sent = True
    return block.owner, block.number, memory


def receive(
    owner: int, number: int, memory: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, Held]:
    """Return so many bytes of a block that a worker sent, and what gives it back."""
    if memory is not None:
        _forget_the_dead()
        _THEIRS[owner, number] = memory
    memory = _THEIRS[owner, number]
    return memory[:count], Held(memory)


def _forget_the_dead() -> None:
    for owner, number in list(_THEIRS):
        if not _is_alive(owner):
            del _THEIRS[owner, number]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
