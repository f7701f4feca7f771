"""The random streams of a process: where they are, and how they get back there.

`Streams` holds the global ones of torch, Python and numpy. `HeldStreams` holds the generators that
samples and their collation draw from alongside them. `EpochStreams` starts the streams of workers
that live on again in each epoch, as new workers would.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, _DatasetKind, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from flatout.agent import patching
from flatout.data.proof.changes import PLAIN, find_change, held_by, state_of
from flatout.data.proof.reachable_functions import reached
from flatout.records.errors import NotApplicable


class Streams:
    """Where the global streams of torch, Python and numpy stood when this was made."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def are_moved(self) -> bool:
        """Return whether anything was drawn from them since."""
        return (
            self.python != random.getstate()
            or not torch.equal(self.torch, torch.default_generator.get_state())
            or _plain(self.numpy) != _plain(np.random.get_state())
        )

    def set_back(self) -> None:
        """Put them there again. A forked copy needs it: Python seeds `random` again there."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


SEED, TROUBLE = 0, 1
"""Places in what the trainer shares with the workers."""
TROUBLES = (
    "",
    "worker_init_fn changes the data set, which it can do once only to the same copy",
    "the iterable data set counts in an attribute, which a fresh copy starts again",
    "the data set makes a random number generator of its own in its workers",
)
_numpy_seed: Callable[[int, int], Any] = getattr(torch_worker, "_generate_state", lambda *_: None)
Generators = Sequence[tuple[Any, Any]]
"""Random number generators, each with where it stood."""


class EpochStreams:
    """A `worker_init_fn` for workers that live on; does what the script asked for in each epoch.

    Write the base seed of an epoch to `seed` before its `for` begins, but for the first.

    Torch seeds a worker when it starts: its global streams from the epoch's base seed and its
    number, then the script's `worker_init_fn`. A worker that lives on keeps its streams where they
    are. Here it hears the next epoch's seed and does all of that again, and what the data set holds
    of random number generators goes back to where a fresh copy of the data set has it.
    """

    def __init__(self, then: Callable[[int], Any] | None = None) -> None:
        self.then = then
        self.memory = ""
        """Why workers that made samples make others than new ones would, where that is known."""
        self._shared = torch.zeros(2, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def seed(self) -> int:
        """The base seed of the epoch that begins next; 0 before the second."""
        return int(self._shared[SEED])

    @seed.setter
    def seed(self, value: int) -> None:
        self._shared[SEED] = value

    @property
    def trouble(self) -> str:
        """Why a worker cannot become as a new one; empty where each can, as far as was seen."""
        return TROUBLES[int(self._shared[TROUBLE])]

    def forget(self) -> None:
        """Take the workers to be new ones: what was in the way of the last ones is gone."""
        self._shared[TROUBLE] = 0

    def __call__(self, number: int) -> None:
        """Start a worker, and be there when its next epoch begins."""
        info = get_worker_info()
        if info is None:
            raise RuntimeError("EpochStreams starts a loader's worker: it is called in one only")
        held, before = generators_of(info.dataset), state_of(info.dataset)
        counts = _counts(info.dataset)
        self._start(number)
        if find_change(before, state_of(info.dataset)) is not None:
            self._note(1)
        in_collate: list[tuple[Any, Any]] | None = None

        def restarting(make: Callable[..., Any]) -> Any:
            def make_and_restart(kind: Any, dataset: Any, *others: Any) -> Any:
                nonlocal in_collate
                if dataset is not info.dataset:
                    return make(kind, dataset, *others)
                if in_collate is None:
                    in_collate = generators_of(others[1])
                else:
                    set_back([*held, *in_collate])
                    seed_worker(self.seed, number)
                    self._start(number)
                fetcher = make(kind, dataset, *others)
                self._look_at(fetcher, dataset, held, counts)
                return fetcher

            return staticmethod(make_and_restart)

        # Torch makes a fetcher when a worker starts and whenever an epoch begins in it. This
        # process is a worker: all else that makes one here are loaders inside samples.
        patching.wrap(_DatasetKind, "create_fetcher", restarting)

    def _look_at(self, fetcher: Any, dataset: Any, held: Generators, counts: Any) -> None:
        """Notice, as batches are made, what a fresh copy of the data set would not have."""
        fetch, known = fetcher.fetch, {id(generator) for generator, _ in held}
        is_first = True

        def fetch_and_look(indices: Any) -> Any:
            nonlocal is_first
            try:
                return fetch(indices)
            finally:
                now = _counts(dataset)
                if any(now.get(name) != value for name, value in counts.items()):
                    self._note(2)
                if is_first and {id(x) for x, _ in generators_of(dataset)} - known:
                    self._note(3)
                is_first = False

        fetcher.fetch = fetch_and_look

    def _note(self, trouble: int) -> None:
        """Tell the trainer what is in the way; the first thing stays."""
        if not self._shared[TROUBLE]:
            self._shared[TROUBLE] = trouble

    def _start(self, number: int) -> None:
        if self.then is not None:
            self.then(number)


def check_loader(loader: Any) -> None:
    """Make sure that the workers of a loader run torch's own loop."""
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        raise NotApplicable(f"{type(loader).__name__} has a way of its own to run its workers")
    if not hasattr(_DatasetKind, "create_fetcher") or not hasattr(torch_worker, "_generate_state"):
        raise NotApplicable(f"torch {torch.__version__} starts an epoch in its workers otherwise")


def seed_worker(base_seed: int, number: int) -> None:
    """Put the global streams of a worker where torch puts those of a new one."""
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    np.random.seed(_numpy_seed(base_seed, number))
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "seed", base_seed + number)  # the class is frozen


def generators_of(dataset: Any, **others: Any) -> list[tuple[Any, Any]]:
    """Return the random number generators that a data set holds, each with where it is."""
    found = [value for _, value in held_by(dataset, **others) if _state(value) is not None]
    return [(value, _state(value)) for value in {id(value): value for value in found}.values()]


def set_back(generators: Generators) -> None:
    """Put generators back to where they stood."""
    for generator, state in generators:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif hasattr(generator, "set_state"):
            generator.set_state(state)  # numpy's older kind
        else:
            generator.bit_generator.state = state


def are_where_they_were(generators: Generators) -> bool:
    """Return whether no one drew from generators since `generators_of` returned them."""
    return all(repr(_plain(_state(x))) == repr(_plain(state)) for x, state in generators)


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return None


def _plain(state: Any) -> Any:
    """Return a generator's state without arrays, which print shortened."""
    if isinstance(state, dict):
        return {name: _plain(part) for name, part in state.items()}
    if isinstance(state, tuple | list):
        return [_plain(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


def _counts(dataset: Any) -> dict[str, Any]:
    """Return the numbers and texts that an iterable data set has as attributes of its own.

    It may count its epochs by them. One whose samples are asked for by number may count, too, but
    hardly ever to make others of it. What is opened late starts as None or False.
    """
    attributes = vars(dataset) if isinstance(dataset, IterableDataset) else {}
    kinds = PLAIN - {bool, type(None)}
    return {name: value for name, value in attributes.items() if type(value) in kinds}


LOOKS = 2
"""Batches before which it is looked: a data set may make its generator with its first sample."""


class HeldStreams:
    """The generators of a fetcher's data set and collation, and of the functions that these use.

    A batch that is made a second time is to have the draws that the first time had.
    """

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._sources = (dataset, collate)
        self._generators: dict[str, Any] = {}
        self._looks = 0
        self._noted: list[tuple[Any, Any]] = []
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of what was looked at, as they are and as they were."""

    def note(self) -> None:
        """Note where the generators stand."""
        if self._looks < LOOKS:
            self._looks += 1
            self._generators = {str(place): one for place, one in enumerate(self._find())}
        else:
            self._held.clear()
        self._noted = generators_of(None, **self._generators)

    def set_back(self) -> None:
        """Put them to where they were noted last.

        Those made since are made again when asked for.
        """
        set_back(self._noted)
        for now, before in self._held:
            for name in [name for name in now if now[name] is not before.get(name)]:
                if not generators_of(None, one=now[name]):
                    continue
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]

    def _find(self) -> list[Any]:
        things: dict[str, Any] = {}
        found: list[tuple[Any, Any]] = []
        with suppress(Exception):  # what the script holds may raise anything where it is looked at
            things = {str(place): one for place, (_, one) in enumerate(reached(*self._sources))}
            attributes = (getattr(one, "__dict__", None) for one in things.values())
            self._held = [(one, dict(one)) for one in attributes if type(one) is dict]
            found = generators_of(self._sources[0], **things)
        return [generator for generator, _ in found]
