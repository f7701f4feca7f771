"""Read the samples from a packed store instead of their files.

What it does: puts a store that `flatout pack` wrote under the training data set, unedited. Of a
store of image files, what the data set opens with Pillow comes from the store; a store that was
packed from the data set itself gives whole samples.
When it helps: the step waits for decoding, and the store holds pixels (--encode raw); or for many
small files that are not cached.
What it costs: disk space for the store, and packing once.
How it is checked: samples drawn by a seed are compared bit by bit, with random streams in the same
place, before anything is replaced. A lossy store is refused: open it with `flatout.data.open`.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final
from weakref import WeakSet

from flatout.analysis.feeding import MIN_WAIT_SHARE, fed_change_ms, share_of
from flatout.data.format import HEADER, STORES, TIMED_SAMPLE, Header, read_header
from flatout.records.errors import NotApplicable, UserError
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state
from flatout.techniques.data.read_ahead import blocked_share, is_cold

if TYPE_CHECKING:
    from flatout.data.proof.changes import ChangeWatch

PATTERN = f"*.packed/{HEADER}"
"""Stores that are found on their own: in the folder where flatout runs."""
READ_SHARE, DECODE_SHARE = 0.02, 0.40
"""Of loading a photograph: 0.025 ms to read and 1.39 ms to decode, of 3.5 ms (research on the input
pipeline, files in the page cache)."""
STORED_MS_SHARE = 0.05
"""What reading a whole sample from a store takes of making it."""
PIXELS = ("raw", "qoi", "zstd")
FILES = ("folder", "table")
"""Kinds of sources whose samples are files with names."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedData(Technique):
    """Read the samples from a packed store."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "blocked_reads"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("read", "decode")
    prepared_by: ClassVar[str] = "flatout pack"
    extra: ClassVar[str] = "pack"
    by_hand: ClassVar[str] = """
Where the training data set is made:
+ from flatout.techniques.data.packed_data import read_from
+ dataset = read_from(dataset, "$path")
"""

    path: str = ""
    """Folder of the packed store."""
    root: str = ""
    """Where the packed files lie now, if they were moved since."""
    watches: "WeakSet[ChangeWatch]" = process_state(WeakSet)
    """Of the data sets whose whole samples come from a store."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PackedData"]:
        """Return the stores that may be those of a training data set."""
        loaders = profile.training_loaders
        if not loaders or profile.share("data_wait") < MIN_WAIT_SHARE:
            return ()
        if any(loader.is_iterable for loader in loaders):
            return ()
        whole = [(path, x) for path, x in find_stores() if not x.sample_of]
        return [cls(path=str(path)) for path, header in whole if header.is_lossless]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take what the store makes unnecessary away from the loading."""
        try:
            header = read_header(Path(self.path))
        except UserError:
            header = None
        share, blocked, why = _saved(header, profile)
        step_ms = fed_change_ms(profile, machine, saved_share=share, saved_blocked=blocked)
        return Effect(step_ms=step_ms, why=why)

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the store under the data set."""
        from flatout.data.dataset_matching import is_packed, watch_of

        if is_packed(arguments["dataset"]):
            return arguments  # a framework rebuilt a loader that already has the technique
        if not self.path:
            raise NotApplicable("no store is named: path = the folder that `flatout pack` wrote")
        dataset = read_from(arguments["dataset"], self.path, self.root)
        watch = watch_of(dataset)
        if watch is not None:
            self.watches.add(watch)
        return {**arguments, "dataset": dataset}

    def end(self) -> str:
        """Say what the script changed of a set whose whole samples are stored, if it did.

        From then on the set makes its samples itself: the store has those of before.
        """
        troubles = (watch.trouble for watch in self.watches if watch.is_changed())
        return next((f"{x}: none came from the store from then on" for x in troubles), "")


def _saved(header: Header | None, profile: Profile) -> tuple[float, float, str]:
    """Return the parts of the loading's CPU time and of its waiting that go, and why.

    Hopeful for files that are not cached: how much faster another storage gives few large files
    than many small ones is for the trial to find out. Pixels are more bytes than files: that
    waiting stays.
    """
    if header is not None and header.source["kind"] not in FILES:
        left = 1 - STORED_MS_SHARE
        return left, left, "samples are stored as the data set makes them"
    # Where no store was made yet, the kind that saves more is meant.
    encoding = header.encoding.kind if header is not None else ""
    decoding = share_of(profile, "decode", otherwise=DECODE_SHARE if encoding else 0.0)
    if encoding in PIXELS or (header is None and decoding and not is_cold(profile)):
        why = f"images are stored as pixels: {decoding:.0%} of a sample's time is decoding"
        return min(1.0, READ_SHARE + decoding), 0.0, why
    if not is_cold(profile):
        return READ_SHARE, 0.0, "files are opened no more"
    why = f"{blocked_share(profile):.0%} of making a batch is waiting for files that are not cached"
    return READ_SHARE, 1.0, f"{why}; a store is a few large files"


def read_from(dataset: Any, path: str, root: str = "") -> Any:
    """Return the data set with its files, or its samples, read from a packed store.

    Args:
        dataset: a map-style data set.
        path: folder of the store.
        root: where the packed files lie now, if they were moved since.

    Raises:
        NotApplicable: if the store's samples are not, bit by bit, those of the data set, or it
            holds some of them only.
    """
    from torch.utils.data import IterableDataset

    from flatout.data.dataset_matching import with_stored_images, with_stored_samples
    from flatout.data.packed_store import PackedStore

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise NotApplicable("the data set is iterable: its samples have no numbers")
    try:
        store = PackedStore(Path(path))
    except UserError as error:
        raise NotApplicable(str(error)) from None
    if store.header.sample_of and os.environ.get(TIMED_SAMPLE) != path:
        raise NotApplicable(
            f"{path} holds {len(store)} of {store.header.sample_of} samples, which stand for all "
            "only in trials that are timed"
        )
    if not store.header.is_lossless:
        raise NotApplicable(
            f"{path} is lossy ({store.header.encoding.kind}): its samples are others than the data "
            "set's; train with flatout.data.open instead, knowingly"
        )
    if store.header.source["kind"] in FILES:
        return with_stored_images(dataset, store, root)
    return with_stored_samples(dataset, store)


def find_stores() -> list[tuple[Path, Header]]:
    """Return the complete stores in the present folder, and those that the environment names."""
    named = [Path(part) for part in os.environ.get(STORES, "").split(os.pathsep) if part]
    found = {path.resolve(): None for path in named}
    found |= {path.parent.resolve(): None for path in sorted(Path.cwd().glob(PATTERN))}
    stores: list[tuple[Path, Header]] = []
    for path in found:
        with contextlib.suppress(UserError):  # an unfinished or foreign folder is no candidate
            stores.append((path, read_header(path)))
    return stores


KOREAN = """
Read the samples from a packed store.
    패킹한 저장소에서 샘플을 읽습니다.
Where the training data set is made:
    학습 데이터셋을 만드는 곳:
no store is named: path = the folder that `flatout pack` wrote
    저장소가 지정되지 않았습니다. path에 `flatout pack`이 쓴 폴더를 주세요
{why}: none came from the store from then on
    {why}. 그때부터는 저장소의 샘플을 쓰지 않았습니다
samples are stored as the data set makes them
    샘플을 데이터셋이 만드는 그대로 저장합니다
images are stored as pixels: {share} of a sample's time is decoding
    이미지를 픽셀로 저장합니다. 샘플을 만드는 시간의 {share}가 디코딩입니다
files are opened no more
    파일을 더는 열지 않습니다
{why}; a store is a few large files
    {why}. 저장소는 큰 파일 몇 개입니다
{path} holds {n} of {whole} samples, which stand for all only in trials that are timed
    {path}에는 샘플 {whole}개 중 {n}개만 있으며, 시간만 재는 시험에서만 전체를 대신합니다
the data set is iterable: its samples have no numbers
    이터러블 데이터셋이라 샘플에 번호가 없습니다
{path} is lossy ({kind}): its samples are others than the data set's; train with flatout.data.open
instead, knowingly
    {path}은(는) 손실 압축({kind})이라 데이터셋의 샘플과 다릅니다. 알고 쓰려면 flatout.data.open으로
    학습하세요
"""
