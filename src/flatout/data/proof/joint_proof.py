"""Prove the ways of a recipe's techniques at once, together, as its loader is going to use them.

A proof keeps the training waiting for its first batch, and one technique alone shows nothing of
how it goes with the others. So the first technique that is asked tries the ways of all of them
in one copy of the process, and the script's own in another. What this does not prove, each
technique proves alone.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from flatout.agent.hooks.loader import recipe_of
from flatout.data.byte_batches.transport import PackingCollate
from flatout.data.proof.batches import (
    BatchComparison,
    can_be_compared,
    compare_first_batches,
    first_batch,
)

Collate = Callable[[Any], Any]


class ProofPart(Protocol):
    """Another way of making a loader's samples, or its batches, with the same bits."""

    @property
    def name(self) -> str:
        """The technique's."""

    def prepare(self) -> Any:
        """Do once what every process of the loader needs; raises NotApplicable."""

    def undo_here(self) -> None:
        """Go the script's way in this process, a copy that is about to end."""

    def try_under(self, collate: Collate) -> tuple[Collate, Callable[[], str]]:
        """Begin in this process, a copy that is about to end.

        Returns:
            What collates then, and what tells after a batch why the way was not taken, if so.
        """


@runtime_checkable
class HasWay(Protocol):
    """A technique that makes batches in another way."""

    def way(self, loader: Any) -> ProofPart | None:
        """Return the way for a loader, None or NotApplicable for none with the same bits."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """What a loader was when its techniques' ways were tried together, and what came of it."""

    dataset: Any
    collate: Any
    has_workers: bool
    names: frozenset[str] = frozenset()
    """Of the techniques whose ways gave the same batch."""

    def is_still(self, loader: Any) -> bool:
        """Return whether the loader is what it was, but for the ways themselves."""
        collate = loader.collate_fn
        if type(collate) is PackingCollate:
            collate = collate.collate
        is_same = loader.dataset is self.dataset and collate is self.collate
        return is_same and bool(loader.num_workers) is self.has_workers


_tried: "WeakKeyDictionary[Any, _Tried]" = WeakKeyDictionary()


def is_proven(loader: Any, name: str) -> bool:
    """Return whether a technique's way gave the script's own first batch, with those of its recipe.

    False for a loader that no recipe was given for, that is not what was tried any more, or that
    has one such technique only: it proves alone.
    """
    if loader not in _tried:
        names = _prove(loader)
        has_workers = bool(loader.num_workers)
        _tried[loader] = _Tried(loader.dataset, loader.collate_fn, has_workers, names)
    tried = _tried[loader]
    return name in tried.names and tried.is_still(loader)


def find_trouble(loader: Any, way: ProofPart, look: BatchComparison | None = None) -> str:
    """Return why a loader's batches cannot be made in another way; empty where they can.

    It is tried before the loader is iterated, in a forked copy of the process unless it is proven.
    """
    if is_proven(loader, way.name):
        return ""
    trouble = can_be_compared(loader)
    if trouble:
        return trouble
    way.prepare()

    def other() -> tuple[Any, Any]:
        collate, trouble = way.try_under(loader.collate_fn)
        return first_batch(loader, collate), trouble()

    trouble, facts = compare_first_batches(loader, other, look, way.undo_here)
    return trouble or str(facts)


def _prove(loader: Any) -> frozenset[str]:
    """Return the names of the techniques whose ways were tried together and gave the same batch."""
    parts = [] if can_be_compared(loader) else _parts(loader)
    if len(parts) <= 1:
        return frozenset()
    # Workers begin with what was put around their start last.
    order = parts[::-1] if loader.num_workers else parts

    def together() -> tuple[Any, Any]:
        collate, checks = loader.collate_fn, {}
        for part in order:
            collate, checks[part.name] = part.try_under(collate)
        batch = first_batch(loader, collate)
        return batch, {name: check() for name, check in checks.items()}

    def undo() -> None:
        for part in parts:
            part.undo_here()

    differs, facts = compare_first_batches(loader, together, undo=undo)
    if differs:
        return frozenset()
    return frozenset(name for name, trouble in facts.items() if not trouble)


def _parts(loader: Any) -> list[ProofPart]:
    """Return the ways that the techniques of the loader's recipe open here, in its order."""
    parts: list[ProofPart] = []
    for technique in recipe_of(loader):
        # Whatever is in the way of one, it says itself when its turn comes.
        with suppress(Exception):
            part = technique.way(loader) if isinstance(technique, HasWay) else None
            if part is not None:
                part.prepare()
                parts.append(part)
    return parts
