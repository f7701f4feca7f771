"""Leave samples out whose files cannot be read, instead of ending the training.

What it does: a sample whose file is gone, cut short or no picture is noted, and its place in the
batch is taken by another of the same batch; batches keep their size and epochs their steps. Left
out is what reading a broken file is answered with: `FileNotFoundError`, Pillow's
`UnidentifiedImageError` and its truncated pictures (an `OSError` without a number) and broken PNGs
(its `SyntaxError`), simplejpeg's `ValueError`, `EOFError`, and the errors of zlib, gzip, zipfile,
struct and pickle. All else ends the training as before: mistakes of the script (`TypeError`,
`KeyError`), memory, devices, workers that die, and failures of the system, which concern more than
one file (no space, no descriptors, no rights, a disk or a network that fails).
When it helps: a few of very many files are broken, and nobody wants to find them one crash at a
time. It makes nothing faster, so no tuning tries it: it acts where a recipe names it.
What it costs: a batch with such a file is read up to three times. Samples that took a place are
seen once more than others. An iterable data set passes over to its next sample; a generator that
raised cannot go on, and ends the training, which says so.
How it is checked: what was left out is counted over all workers and named at the end; more of it
than `most_share` of an epoch, or a first batch of nothing else, ends the training. Without broken
files the batches are torch's own, bit by bit.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.core.errors import NotApplicable
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.technique import Effect, Numerics, Technique
from flatout.seams.ranks import rank_and_size

if TYPE_CHECKING:
    from flatout.data.unreadable import LeftOut

_numbers = itertools.count()
"""Of the loaders of this process: several may leave samples out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkipUnreadable(Technique):
    """Leave out and count what cannot be read."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"bad_image", "file_gone"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    is_for_speed: ClassVar[bool] = False
    by_hand: ClassVar[str] = """
Before each epoch (`fill_unreadable`), and after the training (`what_was_left_out`):
+ from flatout.techniques.data.skip_unreadable import fill_unreadable, what_was_left_out
+ fill_unreadable(loader, most_share=$most_share)
+ print(what_was_left_out().sentence())
"""

    most_share: float = 0.01
    """Share of an epoch's samples, in each rank, that may be left out; one always may."""

    def __post_init__(self) -> None:
        if not 0 < self.most_share < 1:
            raise ValueError(f"most_share={self.most_share} must be between 0 and 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["SkipUnreadable"]:
        """Return nothing: what to do about broken files is for a person to say."""
        del profile, machine
        return ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect no change of the step."""
        del profile, machine
        return Effect(why="it leaves out what cannot be read and makes nothing faster")

    def epoch(self, loader: Any) -> Any:
        """Let the loader fill its batches, and count anew."""
        return fill_unreadable(loader, self.most_share)

    def end(self) -> str:
        """Say what was left out in this rank, and forget it."""
        from flatout.data.unreadable import forget

        found = what_was_left_out()
        forget()
        return found.sentence()


def fill_unreadable(loader: Any, most_share: float = 0.01) -> Any:
    """Let a `DataLoader` leave out samples that cannot be read and fill their places.

    Call it before each epoch, so that the share is one of an epoch.

    Raises:
        NotApplicable: if the loader makes no batches, or is one of several ranks over a stream.
    """
    from torch.utils.data import IterableDataset

    from flatout.data.filling import FillingCollate, find_plan
    from flatout.data.unreadable import own_log

    if loader.batch_size is None and getattr(loader, "batch_sampler", None) is None:
        raise NotApplicable("the loader gives single samples: no other can take a place in a batch")
    if isinstance(loader.dataset, IterableDataset) and rank_and_size() is not None:
        raise NotApplicable(
            "the data set is iterable: a rank that passes over a sample would make fewer steps "
            "than the others, which then wait for it forever"
        )
    # Accelerate's loaders draw from another one below them.
    given, loader = loader, getattr(loader, "base_dataloader", loader)
    plan = find_plan(loader.collate_fn)
    if plan is None:
        plan = FillingCollate(loader.collate_fn, own_log(), next(_numbers), most_share)
        loader.collate_fn = plan
    plan.begin_epoch(epoch_samples(loader))
    return given


def epoch_samples(loader: Any) -> int | None:
    """Return how many samples an epoch of a loader has in this process, None if nobody knows."""
    batches = loader.batch_sampler
    try:
        if loader.batch_size is None and isinstance(getattr(batches, "batch_size", None), int):
            return len(batches) * int(batches.batch_size)  # of a rank: its part alone
        return len(loader.sampler if loader.batch_size is not None else loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def what_was_left_out() -> "LeftOut":
    """Return what this process and its loaders' workers have left out so far."""
    from flatout.data.unreadable import left_out, own_log

    return left_out(own_log().read()[0])
