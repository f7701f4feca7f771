"""How the samples of a data set lie on storage, and how well blocks of neighbours mix.

`arrange` finds it out: records of a packed store lie as they were stored, files in the order of
their inode numbers. It takes the largest blocks of neighbours that mix as well as a shuffle, as
counted by the classes in a batch. `BlockShuffle` is the sampler, `block_shuffle` makes one for any
script.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.caching import free_memory_bytes
from flatout.data.dataset_matching import Stored, find_store, is_packed, store_behind
from flatout.data.file_order import folder_classes, lying_order
from flatout.data.packed_store import CAN_ADVISE, Ahead, Ask, asking_files
from flatout.data.sampler import (
    MAX_BLOCK,
    MIN_WINDOW,
    OrderOptions,
    Places,
    reading_ahead,
    spread_windows,
    stored_numbers,
    unevenness,
)
from flatout.records.errors import NotApplicable
from flatout.records.units import format_bytes
from flatout.techniques.data.read_ahead import files_of
from flatout.techniques.data.read_ahead.dataset_files import MEMORY_SHARE, FindFile

MOST_UNEVEN = 1.03
"""What a packed store in block order is held to: 1.0 within 0.03 (`tests/data/test_order.py`)."""
FREEDOM = 20_000
"""Counts of a class in a batch that an unevenness is the mean of: it is then known to 0.01."""
MOST_COUNTED = 8_000_000
"""Samples that are counted for it at most: a second of one core's work."""
LEAST_BLOCK = 2
MOST_WINDOW_SHARE = 0.25
"""Of an epoch: the first window is read before the first batch comes."""
WEIGHED = 64
"""Files whose size is asked for; all of them would be as many reads of cold inodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """The samples of a data set in the order in which they lie."""

    numbers: Places
    """Of the samples, as the data set counts them."""
    classes: np.ndarray[Any, Any] | None
    """Of each in the same order; None where they were shuffled before they were stored."""
    ask: Ask
    """Asks for what samples of these numbers will read."""
    sample_bytes: float


def layout_of(dataset: Any) -> StorageLayout:
    """Return how the samples of a map-style data set lie.

    Raises:
        NotApplicable: if neither records nor files are known, or nothing tells their classes.
    """
    if is_packed(dataset) or find_store(dataset) is not None:
        return _of_records(store_behind(dataset))
    return _of_files(dataset, files_of(dataset))


def _of_records(stored: Stored) -> StorageLayout:
    store = stored.store
    classes = store.labels()
    if classes is None and store.header.order != "shuffled":
        raise NotApplicable(
            "the store keeps the order of its source and has no labels: how well its blocks mix "
            "cannot be counted"
        )
    return StorageLayout(
        numbers=stored_numbers(store) if stored.is_reordered else np.arange(len(store)),
        classes=classes,
        ask=stored.will_need,
        sample_bytes=sum(shard.bytes for shard in store.header.shards) / max(1, len(store)),
    )


def _of_files(dataset: Any, path_of: FindFile) -> StorageLayout:
    paths = [path_of(number) or "" for number in range(len(dataset))]
    if not all(paths):
        raise NotApplicable("no list of the data set names the files that its samples open")
    try:
        numbers = lying_order(paths)
        weighed = paths[:: max(1, len(paths) // WEIGHED)]
        sample_bytes = sum(Path(path).stat().st_size for path in weighed) / max(1, len(weighed))
    except OSError as error:
        raise NotApplicable(f"a file of the data set cannot be looked at: {error}") from None
    return StorageLayout(
        numbers=numbers,
        classes=_classes(dataset, paths)[numbers],
        ask=asking_files(path_of),
        sample_bytes=sample_bytes,
    )


def _classes(dataset: Any, paths: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the class of each sample: its folder, or what torchvision calls `targets`."""
    classes = folder_classes(paths)
    if classes is not None:
        return classes
    targets = np.asarray(getattr(dataset, "targets", ()))
    if targets.shape != (len(paths),) or targets.dtype == object:
        raise NotApplicable(
            "the files are in one folder and no `targets` tell their classes: how well blocks of "
            "them mix cannot be counted"
        )
    return targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """In what blocks the samples of a data set are read, and what was counted of that order."""

    layout: StorageLayout
    block: int
    window: int
    uneven: float | None = None
    """How unevenly classes fall into batches, over what a full shuffle does; None where none are
    known, of what was shuffled before it was stored."""

    def windows(self, seed: int) -> list[Places]:
        """Return the order of the epoch that has this seed, as places in the layout."""
        return spread_windows(
            len(self.layout.numbers), seed=seed, epoch=0, block=self.block, window=self.window
        )

    def unread(self) -> "Arrangement":
        """Return the same order of samples that come from elsewhere: nothing is asked for."""
        return replace(self, layout=replace(self.layout, ask=len))

    def once(self) -> int:
        """Return how many samples an epoch has exactly once."""
        order = np.concatenate(self.windows(0))
        return int((np.bincount(order, minlength=len(self.layout.numbers)) == 1).sum())

    def jumps(self) -> int:
        """Return how many reads of an epoch do not go on with the neighbour of the one before."""
        return sum(int((np.diff(np.sort(window)) != 1).sum()) + 1 for window in self.windows(0))


def arrange(dataset: Any, batch_size: int, *, block: int = MAX_BLOCK) -> Arrangement:
    """Return the largest blocks, at most `block`, that mix a data set as well as a shuffle.

    Raises:
        NotApplicable: if none does, if nothing tells how the samples lie or what their classes are,
            if two windows of the smallest kind do not fit into memory, or if the system takes no
            advice on what will be read.
    """
    if not CAN_ADVISE:
        raise NotApplicable("this system has no posix_fadvise")
    layout, least = layout_of(dataset), math.inf
    windows = _affordable(len(layout.numbers), layout.sample_bytes)
    while block >= LEAST_BLOCK:
        for window in windows:
            found = Arrangement(layout=layout, block=block, window=window)
            if layout.classes is None:
                return found
            uneven = mixing(found, layout.classes, batch_size)
            if uneven <= MOST_UNEVEN:
                return replace(found, uneven=uneven)
            least = min(least, uneven)
        block //= 2
    raise NotApplicable(
        f"blocks of neighbours mix {least:.2f} times as unevenly as a shuffle at best: "
        "`flatout pack` writes a store that is shuffled"
    )


def _affordable(samples: int, sample_bytes: float) -> list[int]:
    """Return the windows of which two fit into memory: one is trained on while one is read."""
    room = MEMORY_SHARE * free_memory_bytes()
    needed = 2 * min(samples, MIN_WINDOW) * sample_bytes
    if needed > room:
        raise NotApplicable(
            f"two windows of {MIN_WINDOW} samples take {format_bytes(needed)}, more than "
            f"{MEMORY_SHARE:.0%} of the free memory ({format_bytes(room)})"
        )
    most = min(MOST_WINDOW_SHARE * samples, room / (2 * max(sample_bytes, 1.0)))
    doubled = (MIN_WINDOW << times for times in range(1, 16))
    return [MIN_WINDOW, *(window for window in doubled if window <= most)]


def mixing(found: Arrangement, classes: np.ndarray[Any, Any], batch_size: int) -> float:
    """Return how unevenly classes fall into batches, over what a shuffle does: the mean of epochs.

    A single window is a shuffle of all samples.
    """
    if len(found.windows(0)) == 1:
        return 1.0
    shares = np.unique(classes, return_counts=True)[1] / len(classes)
    freedom = len(classes) / batch_size * max(0.1, 1 / float((shares**2).sum()) - 1)
    epochs = max(1, min(math.ceil(FREEDOM / freedom), MOST_COUNTED // len(classes)))
    orders = (np.concatenate(found.windows(seed)) for seed in range(epochs))
    return float(np.mean([unevenness(classes[order], batch_size) for order in orders]))


class BlockShuffle:
    """A sampler: each sample once an epoch, read in blocks that lie together and mixed in windows.

    The order is a function of one number, drawn as torch's own random sampler draws its seed. The
    first window is asked for when an epoch starts, each other one in a thread while the one before
    is trained on.
    """

    def __init__(self, arrangement: Arrangement, generator: Any = None) -> None:
        self.arrangement, self.generator = arrangement, generator

    def __len__(self) -> int:
        return len(self.arrangement.layout.numbers)

    def __iter__(self) -> Iterator[int]:
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        numbers, ask = self.arrangement.layout.numbers, self.arrangement.layout.ask
        ahead = Ahead(ask)
        try:
            for place in reading_ahead(
                self.arrangement.windows(int(drawn.item())),
                lambda places: ask(numbers[places].tolist()),
                lambda places: ahead.want(numbers[places].tolist()),
                OrderOptions(),
            ):
                yield int(numbers[place])
        finally:
            ahead.close()


def block_shuffle(
    dataset: Any, batch_size: int, *, block: int = MAX_BLOCK, generator: Any = None
) -> BlockShuffle:
    """Return the sampler for a `DataLoader` over files or a packed store.

    Args:
        dataset: a map-style data set whose files one of its lists names, or one over a store.
        batch_size: of the loader: how well classes mix is counted in such batches.
        block: most samples that are read together; 2, 4, 8 or 16.
        generator: what the seeds of epochs are drawn from; the global stream by default.

    Raises:
        NotApplicable: as `arrange`.
    """
    return BlockShuffle(arrange(dataset, batch_size, block=block), generator)


KOREAN = """
the store keeps the order of its source and has no labels: how well its blocks mix cannot be counted
    저장소가 원본의 순서 그대로이고 레이블이 없어, 블록이 얼마나 잘 섞이는지 셀 수 없습니다
a file of the data set cannot be looked at: {error}
    데이터셋의 파일을 볼 수 없습니다: {error}
the files are in one folder and no `targets` tell their classes: how well blocks of them mix cannot
be counted
    파일이 한 폴더에 있고 클래스를 알려 주는 `targets`가 없어, 블록이 얼마나 잘 섞이는지 셀 수
    없습니다
blocks of neighbours mix {ratio} times as unevenly as a shuffle at best: `flatout pack` writes a
store that is shuffled
    이웃한 블록은 가장 나아도 셔플의 {ratio}배로 고르지 않게 섞입니다. `flatout pack`은 섞인
    저장소를 씁니다
two windows of {n} samples take {size}, more than {share} of the free memory ({room})
    샘플 {n}개짜리 윈도 두 개가 {size}로 빈 메모리({room})의 {share}를 넘습니다
"""
