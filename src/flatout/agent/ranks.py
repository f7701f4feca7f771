"""The ranks of a multi-process training on this machine: they stop at one step, together.

A rank that ended on its own would leave the others in a collective that no one completes. So the
first rank writes into shared memory at which segment everybody stops, some segments ahead of the
rank that is furthest, and all leave only once the last of them has written its result.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flatout.records.trial_result import RankPlace

BOARD = "ranks"
"""Name of the shared memory in the trial's folder."""
MAX_RANKS = 4096
"""Slots by global rank; the file is sparse, so unused ones cost nothing."""
BOARD_BYTES = 8 * (1 + 2 * MAX_RANKS)
ENTER_BY = 8
"""Segments after which a process that is in no group is taken to be alone: groups are made before
the training begins, and asking costs 3 us."""
AHEAD = 4
"""Segments between the agreement and the stop: ranks that step together are at most one apart, and
optimizers that alternate make two or three segments of a step."""
LEAVE_S = 30.0
"""How long a rank waits for the others' results before it leaves: writing takes a second."""
POLL_S = 0.01


class Ranks:
    """This process's view of the other ranks; alone until a group or an environment says more."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rank, self.size = 0, 1
        self.owner = -1
        self.board: memoryview | None = None
        self.is_settled = False
        """Whether this process is known to be alone for good."""

    @property
    def is_alone(self) -> bool:
        """Whether no other rank is known."""
        return self.board is None or self.owner != os.getpid()

    @property
    def leads(self) -> bool:
        """Whether this rank decides when all stop: the lowest one on this machine."""
        return self.is_alone or self.rank == min(self._present())

    def progress(self, segments: int) -> None:
        """Tell the others how far this rank is; the first call in a group enters it."""
        self.is_settled = self.is_alone and segments > ENTER_BY
        if self.is_alone and segments <= ENTER_BY:
            self._enter()
        if self.board is not None and self.owner == os.getpid():
            self.board[1 + 2 * self.rank] = segments

    def agree_to_stop(self) -> None:
        """Set the segment at which every rank stops, once."""
        board = self.board
        if board is not None and not self.is_alone and board[0] == 0:
            board[0] = AHEAD + max(board[1 + 2 * rank] for rank in self._present())

    def is_agreed(self) -> bool:
        """Return whether a stop was set."""
        return not self.is_alone and self.board is not None and self.board[0] > 0

    def is_over(self, segments: int) -> bool:
        """Return whether this rank has come to the segment where all stop."""
        board = self.board
        return board is not None and not self.is_alone and 0 < board[0] <= segments

    def leave(self, beat: Callable[[], None]) -> None:
        """Wait until every rank has written its result: what they still send must arrive."""
        board = self.board
        if board is None or self.is_alone:
            return
        board[2 + 2 * self.rank] = 1
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end and not all(board[2 + 2 * r] for r in self._present()):
            beat()
            time.sleep(POLL_S)

    def facts(self) -> RankPlace | None:
        """Return rank and world size; None for a training of one process."""
        if self.is_alone:
            return None
        return RankPlace(rank=self.rank, world_size=self.size)

    def _present(self) -> list[int]:
        """Return the ranks of this machine that have made a segment, this one included."""
        board = self.board
        if board is None:
            return [self.rank]
        seen = [rank for rank in range(min(self.size, MAX_RANKS)) if board[1 + 2 * rank]]
        return seen or [self.rank]

    def _enter(self) -> None:
        found = rank_and_size()
        if found is None or not self.folder or found[0] >= MAX_RANKS:
            return
        path = Path(self.folder) / BOARD
        with path.open("a+b") as file:
            file.truncate(BOARD_BYTES)
            self.board = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("q")
        self.rank, self.size = found
        self.owner = os.getpid()


def rank_and_size() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks; None for a training of one process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        return (distributed.get_rank(), size) if size > 1 else None
    rank, size_text = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdigit() and size_text.isdigit()) or int(size_text) < 2:
        return None
    return int(rank), int(size_text)


def own_rank() -> int:
    """Return this process's rank, 0 for a training of one process."""
    found = rank_and_size()
    return found[0] if found else 0
