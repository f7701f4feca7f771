"""Shared memory for batches that goes back and forth between a worker and the training process.

A loader's worker allocates shared memory for every batch, and the kernel clears and maps each page
of it again: 0.15 ms for an image of 0.15 MB, more than writing it. Here a worker keeps a few
blocks; one byte at the end of each says whether the training process is done with it. A block is
sent once, then only named. All of it is anonymous and goes with its processes. `sent` moves what a
batch needs to a device, without waiting for the device.
"""

import os
import threading
import weakref
from typing import Any

import torch


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device.

    To CUDA it goes through page-locked memory: a copy from ordinary memory, however small, waits
    until the stream has done all its work, and the training's kernels are in that stream.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    pinned = values if values.is_pinned() else values.pin_memory()
    return pinned.to(device, non_blocking=True)


MAX_BLOCKS = 64
"""Blocks of one worker at most: what it sends beyond that is not used again."""
SMALLEST = 4096
FREE, BUSY = 0, 1

_OURS: list["RingBlock"] = []
"""In a worker: its blocks."""
_OURS_LOCK = threading.Lock()
"""Samples may be made, and stacked, in several threads of a worker."""
_THEIRS: dict[tuple[int, int], "Shared"] = {}
"""In the training process: what is behind a worker's process id and a block's number."""


class RingBlock:
    """One block of a worker's."""

    __slots__ = ("flag", "is_out", "is_sent", "lease", "memory", "number", "owner")

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        self.memory = memory
        self.flag = flag_of(memory)
        self.number = number
        self.owner = os.getpid()
        self.is_sent = False
        """Whether the training process has the memory and needs only its name."""
        self.is_out = False
        """Whether it is on its way there, or in use there."""
        self.lease: Any = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no one uses it: no view of it is left here, and what was sent is given back."""
        is_back = not self.is_out or int(self.flag[0]) == FREE
        return is_back and self.lease() is None


class Shared:
    """A worker's block in the training process."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._flag = flag_of(memory)
        self._users = 0
        self._count = threading.RLock()  # a user may be let go of while this thread counts

    def begin(self) -> None:
        """Count one more field of a batch that is here: a script may give one twice."""
        with self._count:
            self._users += 1

    def end(self) -> None:
        """Let the worker write here again once no field is left."""
        with self._count:
            self._users -= 1
            if not self._users:
                self._flag[0] = FREE


class Held:
    """A block in use in the training process; given back when it is let go."""

    __slots__ = ("owner", "shared")

    def __init__(self, shared: Shared) -> None:
        self.shared: Shared | None = shared
        self.owner = os.getpid()
        shared.begin()

    def give_back(self) -> None:
        """Let the worker write to it again."""
        shared, self.shared = self.shared, None
        # A forked copy of the training process lets go of its copy only.
        if shared is not None and self.owner == os.getpid():
            shared.end()

    def __del__(self) -> None:
        self.give_back()


def flag_of(memory: torch.Tensor) -> Any:
    """Return a block's last byte, to be read and written in any thread.

    As numpy's: what is made in `torch.inference_mode` may not be written to outside of it, and
    whether it is entered is known to each thread for itself.
    """
    return memory.numpy()[-1:]


def new_shared(count: int) -> torch.Tensor:
    """Return bytes in shared memory."""
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def borrow(count: int) -> tuple[torch.Tensor, RingBlock | None]:
    """Return shared memory for so many bytes, and its block: None where it cannot be kept."""
    with _OURS_LOCK:
        block = _find_free(room_for(count + 1))
        if block is None:
            return new_shared(count), None
        # This array lives as long as the storage of the tensor, so as long as any view of either.
        lent = block.memory[:count].numpy()
        block.is_out, block.lease = False, weakref.ref(lent)
        return torch.from_numpy(lent), block


def _find_free(size: int) -> RingBlock | None:
    """Return a block of this size that no one uses; None where there are too many of them."""
    if _OURS and _OURS[0].owner != os.getpid():
        _OURS.clear()  # forked off a process that had some
    block = next((x for x in _OURS if x.memory.numel() == size and x.is_free), None)
    if block is None and len(_OURS) < MAX_BLOCKS:
        block = RingBlock(new_shared(size), len(_OURS))
        _OURS.append(block)
    return block


def room_for(count: int) -> int:
    """Return the size of a block for so many bytes: an eighth more at most.

    Batches of windows differ in size; what is not written to takes no memory.

    >>> room_for(3), room_for(9_633_793), room_for(9_633_000)
    (4096, 10485760, 10485760)
    """
    step = max(SMALLEST, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def send(block: RingBlock) -> tuple[int, int, torch.Tensor | None]:
    """Return what names the block to the training process; called when a batch is pickled."""
    memory = None if block.is_sent else block.memory
    block.flag[0] = BUSY
    block.is_out = block.is_sent = True
    return block.owner, block.number, memory


def receive(
    owner: int, number: int, memory: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, Held]:
    """Return so many bytes of a block that a worker sent, and what gives it back."""
    if memory is not None:
        forget_ended()
        _THEIRS[owner, number] = Shared(memory)
    shared = _THEIRS[owner, number]
    return shared.memory[:count], Held(shared)


def forget_ended() -> None:
    """Let go of the blocks of ended workers; one that is in use goes when it is given back."""
    for owner, number in list(_THEIRS):
        if not _is_alive(owner):
            _THEIRS.pop((owner, number), None)  # threads of several loaders look at the same time


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
