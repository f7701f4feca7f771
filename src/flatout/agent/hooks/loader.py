"""The loader hook point: what a script asks of `DataLoader`, and the iterator it draws from."""

import functools
import inspect
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from flatout.agent import patching
from flatout.agent.events import EMPTY, leave_note
from flatout.agent.measuring.source_lines import SourceLines
from flatout.agent.samples import batch_digest, first_samples, note_chosen, samples_of, tensor_bytes
from flatout.agent.session import Session
from flatout.agent.step_sampler import nothing
from flatout.agent.untouched import streams_kept
from flatout.agent.worker_start import note_start
from flatout.records import phase_clock as phases
from flatout.records.technique import Technique, hook_points_of
from flatout.records.trial_result import LoaderSeen

DEPTH = 4
"""Calling functions that make an address; Trainer and Accelerate build training and evaluation
loaders in one place, their callers tell them apart."""


class AddressBook:
    """Name construction sites by the functions that called, innermost first.

    The names stay the same from run to run and survive small edits. Two sites within the same
    functions get different ordinals, in order of first use; the same site used again (a loader
    rebuilt at every epoch) keeps its address.
    """

    def __init__(self) -> None:
        self._sites: dict[str, list[tuple[int, ...]]] = {}

    def name(self, frame: FrameType | None) -> str:
        """Return the address of the site that `frame` is executing."""
        functions: list[str] = []
        offsets: list[int] = []
        while frame is not None and len(functions) < DEPTH:
            if not _is_plumbing(frame):
                file = Path(frame.f_code.co_filename).name
                functions.append(f"{file}:{frame.f_code.co_name}")
                offsets.append(frame.f_lasti)
            if frame.f_code.co_name == "<module>":
                break
            frame = frame.f_back
        chain = "<".join(functions)
        sites = self._sites.setdefault(chain, [])
        site = tuple(offsets)
        if site not in sites:
            sites.append(site)
        return f"{chain}#{sites.index(site)}"


def _is_plumbing(frame: FrameType) -> bool:
    """Return whether a frame belongs to torch's loader or to us."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(("torch.utils.data", "flatout.", "functools", "importlib"))


def builder(frame: FrameType | None) -> str:
    """Return the module of the innermost frame that is neither torch's nor ours."""
    while frame is not None and _is_plumbing(frame):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


MASK = "attention_mask"
PADDED_BATCHES = 8
"""First batches whose padding is counted: reading a mask takes microseconds, and few are enough."""
DATA_SET, COLLATE = "data set", "collate_fn"
TOKENIZER_METHODS = ("get_vocab", "encode_batch", "encode_as_ids", "encode_ordinary")
"""A tokenizer has one of these: Hugging Face, tokenizers, sentencepiece, tiktoken."""


def tokenizer_place(dataset: Any, collate: Any) -> str:
    """Return where a tokenizer is held: `data set`, `collate_fn`, or nothing."""
    if any(map(is_tokenizer, _held_by_dataset(dataset))):
        return DATA_SET
    return COLLATE if any(map(is_tokenizer, _held_by_collate(collate))) else ""


def is_tokenizer(thing: Any) -> bool:
    """Return whether a thing turns text into numbers."""
    kind = type(thing)
    return any(callable(getattr(kind, name, None)) for name in TOKENIZER_METHODS)


def _held_by_dataset(dataset: Any) -> Iterator[Any]:
    depth = 0
    while dataset is not None and depth < 4:  # a subset of a subset
        yield from getattr(dataset, "__dict__", {}).values()
        dataset, depth = getattr(dataset, "dataset", None), depth + 1


def _held_by_collate(collate: Any) -> Iterator[Any]:
    inner = getattr(collate, "func", collate)
    yield from (getattr(collate, "keywords", None) or {}).values()
    yield from getattr(inner, "__dict__", {}).values()
    yield from getattr(getattr(inner, "__self__", None), "__dict__", {}).values()  # of a method
    yield from map(_content, getattr(inner, "__closure__", None) or ())
    known = getattr(inner, "__globals__", {})
    yield from (known[name] for name in _names(getattr(inner, "__code__", None)) if name in known)


def _names(code: CodeType | None) -> Iterator[str]:
    """Yield the global names that a function uses, in its comprehensions too."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names(constant if isinstance(constant, CodeType) else None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that the function does not have yet
        return None


def note_padding(facts: MutableMapping[str, Any], batch: Any, count: int) -> None:
    """Keep the mean share of padding of the first batches, where they have a mask."""
    share = padding_of(batch) if count < PADDED_BATCHES else None
    if share is not None:
        before = facts.get("pad_share")
        facts["pad_share"] = share if before is None else (before * count + share) / (count + 1)


def padding_of(batch: Any) -> float | None:
    """Return the share of a batch's tokens that its mask takes out; None without a mask."""
    mask: Any = batch.get(MASK) if isinstance(batch, Mapping) else None
    shape = getattr(mask, "shape", ())
    if len(shape) != 2 or not math.prod(shape):
        return None
    return 1.0 - float((mask != 0).sum()) / math.prod(shape)  # of an array as well


WORKER_ARGUMENTS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""Arguments that `DataLoader` refuses when there are no workers."""
REBUILDERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Frameworks that build a loader of the script's again, over the same data set."""
LENGTH_ASKED = "_IterableDataset_len_called"
"""On a loader: the length that torch holds a stream to, once the script asked for it."""
ADDRESS = "_flatout_address"
USED = "_flatout_used"
"""Of a loader that was iterated."""
STARTED = "_flatout_started"
"""On an iterator that has given no batch yet: how long it took to make."""
_recipes: "weakref.WeakKeyDictionary[Any, Sequence[Technique]]" = weakref.WeakKeyDictionary()
"""Of each training loader the techniques of its recipe; not on the loader, which may be pickled."""
MAX_EPOCHS = 8
"""Ends of epochs whose samples are kept."""
MAX_SIZES = 64
"""Batches whose bytes are added up; their median is known by then."""


def note_recipe(loader: Any, techniques: Sequence[Technique]) -> None:
    """Note the techniques of a loader; some prepare its first batch together."""
    _recipes[loader] = techniques


def recipe_of(loader: Any) -> Sequence[Technique]:
    """Return the techniques of a training loader; none of one that no recipe was given for."""
    return _recipes.get(loader, ())


def install(session: Session) -> None:
    """Listen to, and transform, every `DataLoader` built from now on."""
    from torch.utils.data import dataloader

    _Construction(session).install(dataloader.DataLoader)
    _Iteration(session).install(dataloader)


class _Construction:
    """Replace `DataLoader.__init__`: pass the training loaders' arguments through the recipe."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.book = AddressBook()
        self.lines = SourceLines()
        self.built: list[weakref.ref[Any]] = []
        self.only = frozenset(session.spec.recipe.training_loaders)

    def install(self, kind: Any) -> None:
        patching.wrap(kind, "__init__", self.through_recipe)

    def through_recipe(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Return the constructor, given what the recipe makes of the arguments."""
        signature = inspect.signature(build)

        @functools.wraps(build)  # Lightning and Accelerate read the constructor's signature
        def construct(loader: Any, *args: Any, **kwargs: Any) -> None:
            if not self.session.is_mine():
                build(loader, *args, **kwargs)
                return
            try:
                asked = _asked(signature, loader, args, kwargs)
            except TypeError:
                build(loader, *args, **kwargs)  # the script's own mistake: torch explains it
                return
            frame = sys._getframe(1)
            address = self.find_original(builder(frame), asked)
            if address is None:
                address = self.told_apart(self.book.name(frame), asked)
            self._build(build, loader, asked, address, (args, kwargs))
            self._remember(loader, asked, address, frame)

        return construct

    def find_original(self, module: str, asked: Mapping[str, Any]) -> str | None:
        """Return the address of the loader that a framework builds again, None for a new one.

        Accelerate builds every loader again in one place, training and evaluation alike.
        """
        self.built = [reference for reference in self.built if reference() is not None]
        if not module.startswith(REBUILDERS):
            return None
        live = (loader for reference in self.built if (loader := reference()) is not None)
        same = [loader for loader in live if loader.dataset is asked["dataset"]]
        sampler = asked.get("batch_sampler")
        same.sort(key=lambda loader: loader.batch_sampler is not sampler)
        return same[0].__dict__.get(ADDRESS) if same else None

    def told_apart(self, address: str, asked: Mapping[str, Any]) -> str:
        """Return the address of one of several loaders that one line makes, as comprehensions do.

        Those before it are there, over other data and not iterated yet. A loader that is made again
        in each epoch comes after the one before it was used.
        """
        waiting = {
            loader.__dict__.get(ADDRESS)
            for reference in self.built
            if (loader := reference()) is not None
            and USED not in loader.__dict__
            and loader.dataset is not asked["dataset"]
        }
        names = itertools.chain((address,), (f"{address}.{n}" for n in itertools.count(1)))
        return next(name for name in names if name not in waiting)

    def _build(
        self,
        build: Any,
        loader: Any,
        asked: Mapping[str, Any],
        address: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        args, kwargs = given
        wanted = dict(asked)
        if not self.only or address in self.only:
            wanted = dict(self.session.transform("loader", asked))
        # By identity: a data set may call itself equal to the one that replaces it.
        if len(wanted) == len(asked) and all(wanted.get(x, build) is asked[x] for x in asked):
            build(loader, *args, **kwargs)
            return
        if not wanted.get("num_workers"):
            for name in WORKER_ARGUMENTS:
                wanted.pop(name, None)
        try:
            build(loader, **wanted)
        except Exception as error:  # noqa: BLE001  a wrong wish of ours: build what was asked
            why = f"the DataLoader refused: {error}"
            for technique in self.session.techniques:
                if "loader" in hook_points_of(technique):
                    self.session.note_status(technique, "failed", why)
            build(loader, *args, **kwargs)

    def _remember(
        self, loader: Any, asked: Mapping[str, Any], address: str, frame: FrameType | None
    ) -> None:
        loader.__dict__[ADDRESS] = address
        self.built.append(weakref.ref(loader))
        if address in self.session.loaders:
            self.session.loaders[address].builds += 1
        else:
            facts = {"effective_workers": loader.num_workers, "line": self.lines.of(frame)}
            self.session.quietly(self._note_facts)(loader, asked, address, facts)

    def _note_facts(
        self, loader: Any, asked: Mapping[str, Any], address: str, facts: Mapping[str, Any]
    ) -> None:
        with streams_kept():  # some samplers draw their batches to tell how many there are
            known = _facts(loader, asked)
        self.session.loaders[address] = LoaderSeen(address, {**known, **facts})


def _asked(
    signature: inspect.Signature, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, those left out with their defaults."""
    bound = signature.bind(loader, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    arguments |= arguments.pop("kwargs", {})
    return arguments


def _facts(loader: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values that describe the loader as the script asked for it."""
    from torch.utils.data import IterableDataset

    dataset = asked.get("dataset")
    return {
        "dataset": type(dataset).__name__,
        "dataset_len": _length(dataset),
        "batch_size": _asked_size(asked) or _batch_size(loader),
        "effective_batch_size": _batch_size(loader),
        "num_workers": int(asked.get("num_workers") or 0),
        "pin_memory": bool(asked.get("pin_memory")),
        "persistent_workers": bool(asked.get("persistent_workers")),
        "prefetch_factor": asked.get("prefetch_factor"),
        "is_iterable": isinstance(dataset, IterableDataset),
        "drop_last": _drops_last(loader, asked),
        "steps_per_epoch": _steps(loader),
        "tokenizes": tokenizer_place(dataset, asked.get("collate_fn")),
        "sampler": type(getattr(loader, "sampler", None)).__name__,
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # noqa: BLE001  the script's own length, which it did not ask for, may raise any
        return None


def _steps(loader: Any) -> int | None:
    """Return a loader's length; torch must not take it for a question of the script's."""
    asked = loader.__dict__.get(LENGTH_ASKED)
    try:
        return _length(loader)
    finally:
        if LENGTH_ASKED in loader.__dict__:
            loader.__dict__[LENGTH_ASKED] = asked


def _drops_last(loader: Any, asked: Mapping[str, Any]) -> bool:
    """Return whether batches that are not whole are left out, by a batch sampler of its own too."""
    return bool(asked.get("drop_last") or getattr(loader.batch_sampler, "drop_last", False))


def _asked_size(asked: Mapping[str, Any]) -> int | None:
    size = asked.get("batch_size")
    return size if asked.get("batch_sampler") is None and isinstance(size, int) else None


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


class _Iteration:
    """Replace the loader's `__iter__` (transform) and its iterator's `__next__` (listen)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.only = frozenset(session.spec.recipe.training_loaders)
        self.is_drawing = False
        """Whether a batch is drawn: a data set may draw its parts from loaders of its own."""

    def install(self, dataloader: Any) -> None:
        patching.wrap(dataloader.DataLoader, "__iter__", self.iterated)
        patching.wrap(dataloader._BaseDataLoaderIter, "__next__", self.listen)
        note_chosen(dataloader._BaseDataLoaderIter)

    def iterated(self, start: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the start of an epoch, through the recipe."""
        session = self.session

        @functools.wraps(start)
        def iterate(loader: Any) -> Any:
            return self.begin(start, loader) if session.is_mine() else start(loader)

        return iterate

    def listen(self, draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the drawing of a batch in a phase of its own, and what was drawn counted."""
        session, sampler, signs = self.session, self.session.sampler, self.session.signs
        saw_end = session.quietly(self.saw_end)

        @functools.wraps(draw)
        def draw_next(iterator: Any) -> Any:
            if get_ident() != session.thread:
                session.draws_elsewhere = True
                return draw(iterator)
            if self.is_drawing:
                return draw(iterator)
            clock, is_noted = session.clock, sampler.skips_left and sampler.source() is iterator
            began = clock.now()
            if not is_noted:
                clock.push(phases.DATA_WAIT)
            self.is_drawing, signs[1] = True, 1
            try:
                batch = draw(iterator)
            except StopIteration:
                saw_end(iterator, clock.now() - began)
                raise
            finally:
                self.is_drawing, signs[1] = False, 0
                if not is_noted:
                    clock.pop()
            if is_noted:
                sampler.drawn += 1  # counted when the next step is sampled
                if clock.now() - began > sampler.below_s:  # a stall, which steps seldom have
                    clock.give(phases.DATA_WAIT, began)
                return batch
            try:
                self.saw_batch(iterator, batch, clock.since - began)
            except Exception as error:  # noqa: BLE001  what is counted must never end the training
                session.note_failure(self.saw_batch, error)
            return batch

        return draw_next

    def saw_end(self, iterator: Any, took_s: float) -> None:
        """Note what the end of an epoch took."""
        address = iterator.__dict__.get(ADDRESS, "")
        self.session.note_drained(address)
        seen = self.session.loaders.get(address)
        if seen is None:
            return
        seen.ends_s.append(took_s)
        if len(seen.epoch_samples) < MAX_EPOCHS:
            seen.epoch_samples.append(first_samples(iterator))
        if not seen.batches:
            leave_note(self.session.spec.folder, EMPTY, {"address": seen.address, **seen.asked})

    def begin(self, start: Callable[[Any], Any], loader: Any) -> Any:
        """Start an epoch: torch's iterator, passed through the recipe for training loaders."""
        session = self.session
        address = loader.__dict__.get(ADDRESS, "")
        loader.__dict__[USED] = True
        is_ours = not self.only or address in self.only
        session.clock.push(phases.DATA_WAIT)
        began = session.clock.since
        try:
            if is_ours:
                session.quietly(note_recipe)(loader, session.techniques)
                session.transform("epoch", loader)
            if address in session.loaders:
                session.quietly(note_start)(session.loaders[address].asked, loader)
            iterator = start(loader)
            # A generator, or an object with slots, has no place for notes: it stays as it is.
            notes = getattr(iterator, "__dict__", None)
            if notes is not None:
                notes |= {ADDRESS: address, STARTED: session.clock.now() - began}
                if is_ours:
                    iterator = session.transform("batches", iterator, loader)
        finally:
            session.clock.pop()
        session.segment.loader_starts += 1
        session.sampler.change_source(nothing)
        seen = session.loaders.get(address)
        if seen is not None:
            seen.epochs += 1
            if len(seen.begun_at) < MAX_EPOCHS:
                seen.begun_at.append(seen.batches)
        session.fire("epoch", address)
        return iterator

    def saw_batch(self, iterator: Any, batch: Any, waited_s: float) -> None:
        """Count a batch; only shapes are read, of the first ones also how much is padding."""
        session = self.session
        address = iterator.__dict__.get(ADDRESS, "")
        started_s = iterator.__dict__.pop(STARTED, None)
        segment = session.segment
        segment.batches += 1
        seen = session.loaders.get(address)
        size = samples_of(iterator, batch, seen.asked["effective_batch_size"] if seen else None)
        segment.samples += size
        session.sampler.change_source(weakref.ref(iterator), seen, size)
        if not session.sampler.skips_left:
            session.note_drawn(address)
        session.last_size = size
        if seen is not None:
            seen.batches += 1
            if started_s is not None:
                seen.starts_s.append(started_s + waited_s)
                seen.first_batch = seen.first_batch or batch_digest(iterator, batch)
            if len(seen.batch_bytes) < MAX_SIZES:
                note_padding(seen.asked, batch, len(seen.batch_bytes))
                seen.batch_bytes.append(tensor_bytes(batch))
        session.beat()
        if session.listeners["batch"]:
            session.fire("batch", batch, address)


def as_received(collate: Any, batch: Any) -> Any:
    """Return a fetcher's batch as the loop receives it: techniques may let it travel packed.

    Such a technique's collation has `restore_batch`; others may be wrapped around it.
    """
    while collate is not None:
        restore = getattr(collate, "restore_batch", None)
        if restore is not None:
            return restore(batch)
        collate = getattr(collate, "__wrapped__", None)
    return batch
