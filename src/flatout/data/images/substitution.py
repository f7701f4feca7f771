"""Put another way of making samples under a loader, once it was seen to give the same batches."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flatout.agent.patching import Patch
from flatout.records.errors import NotApplicable

FIRST_COMPARED = 4
"""Samples of each kind that a process makes both ways before it trusts the other way."""


COMPARED_EVERY = 256
"""Of the samples after these, one in so many is compared as well."""


@dataclass(slots=True, kw_only=True)
class SubstituteState:
    """What became of another way in this process."""

    made: int = 0
    """Samples that the other way made."""
    compared: int = 0
    """Samples that were made both ways."""
    trouble: str = ""
    """Why everything is made in the script's way again; empty while it is not."""
    seen: dict[Any, int] = field(default_factory=dict)
    """Samples so far of each kind."""
    undo: Callable[[], None] = field(default=lambda: None)
    """Puts the script's own way back."""
    is_off: bool = False
    """Whether a screen has switched it off for now."""

    @property
    def rests(self) -> bool:
        """Whether samples are made in the script's way."""
        return self.is_off or bool(self.trouble)

    def is_compared(self, kind: Any) -> bool:
        """Count one more sample of a kind; say whether it is made both ways."""
        number = self.seen[kind] = self.seen.get(kind, 0) + 1
        return number <= FIRST_COMPARED or number % COMPARED_EVERY == 0


SwapT = TypeVar("SwapT", bound=SubstituteState)
_SWAPS: dict[type, SubstituteState] = {}
"""The swap of each kind that is on in this process: it replaces functions of Pillow's, which belong
to the process."""


def put_on(swap: SwapT, patch: Callable[[SwapT], Sequence[Patch]]) -> SwapT:
    """Put a swap on for this process and return it; or the one of its kind that is on already."""
    known = find_swap(type(swap))
    if known is not None:
        return known
    patches = patch(swap)

    def undo() -> None:
        if _SWAPS.get(type(swap)) is swap:
            del _SWAPS[type(swap)]
            for each in patches:
                each.undo()

    swap.undo = undo
    _SWAPS[type(swap)] = swap
    return swap


def find_swap(kind: type[SwapT]) -> SwapT | None:
    """Return the swap of a kind that is on in this process, None without one."""
    found = _SWAPS.get(kind)
    return found if isinstance(found, kind) else None


def turn_swap(kind: type[SubstituteState], *, is_on: bool) -> None:
    """Switch the swap of a kind on or off, if it is there in this process."""
    swap = find_swap(kind)
    if swap is not None:
        swap.is_off = not is_on


def prepare(module: str) -> None:
    """Import here what is put under Pillow, not in each copy and worker."""
    if importlib.util.find_spec("PIL") is None:
        raise NotApplicable("Pillow is not installed")
    importlib.import_module(module)


class InWorker:
    """A loader's `worker_init_fn` that swaps something, then does what the script asked for."""

    def __init__(
        self, name: str, begin: Callable[[], Any], then: Callable[[int], Any] | None
    ) -> None:
        self.name, self.start_here, self.then = name, begin, then

    def __call__(self, number: int) -> None:
        """Start a worker."""
        self.start_here()
        if self.then is not None:
            self.then(number)


LinkT = TypeVar("LinkT")


def find_link(loader: Any, kind: type[LinkT]) -> LinkT | None:
    """Return the part of a kind in the chain of what a loader's workers do when they start.

    Each part of ours is an object that has what comes after it as `then`.

    Look when an epoch begins, not when the loader is built: frameworks set a start of their own
    on a loader that has none yet (Lightning does, to seed its workers).
    """
    found = loader.worker_init_fn
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "then", None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitute:
    """Another way of making samples."""

    name: str
    begin: Callable[[], Any]
    """Swaps for this process; returns what becomes of it, with `trouble`, `made` and `compared`.
    Can be pickled, for workers that are not forked."""
    prepare: Callable[[], Any]
    """Done once before the proof; raises NotApplicable where the way is not open here."""
    nothing: str
    """Why it is refused where the samples do not come by it."""
    is_lossy: bool = False
    """Whether pictures need to be alike only."""

    def undo_here(self) -> None:
        """Make samples in the script's way in this process, a copy that is about to end."""
        self.begin().undo()

    def try_under(
        self, collate: Callable[[Any], Any]
    ) -> tuple[Callable[[Any], Any], Callable[[], str]]:
        """Swap in this process, a copy; return what tells then why the way was not taken, if so."""
        swap = self.begin()
        # It may have been at work for another loader already.
        swap.made, swap.compared, swap.seen = 0, 0, {}
        return collate, lambda: self._trouble_of(swap)

    def _trouble_of(self, swap: Any) -> str:
        if swap.trouble:
            return str(swap.trouble)
        return "" if swap.made + swap.compared else self.nothing


def put_under(loader: Any, way: Substitute) -> Any:
    """Swap for a loader that was not iterated yet; asked again, it changes nothing."""
    refused, swapped = f"_flatout_no_{way.name}", f"_flatout_{way.name}"
    known = loader.__dict__
    if known.get(swapped):
        return loader
    if refused not in known:
        # Techniques are imported where there is no torch, which the proof needs.
        from flatout.data.proof.batches import ALIKE
        from flatout.data.proof.joint_proof import find_trouble

        known[refused] = find_trouble(loader, way, ALIKE if way.is_lossy else None)
    if known[refused]:
        raise NotApplicable(known[refused])
    if loader.num_workers:
        loader.worker_init_fn = InWorker(way.name, way.begin, loader.worker_init_fn)
    else:
        way.begin()
    known[swapped] = True
    return loader
