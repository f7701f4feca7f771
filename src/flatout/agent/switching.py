"""Switch techniques on and off between the steps of a training that runs.

Training calls of the roots, and backward, go through here meanwhile. Where a technique fails there,
it is switched off, the call is made again without it, and the training goes on: its numbers prove
nothing, only its time is read.
"""

import functools
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flatout.agent import patching
from flatout.agent.session import Session
from flatout.records.errors import NotApplicable
from flatout.records.technique import (
    RunningTraining,
    Switch,
    Technique,
    is_switched_in_fetcher,
    name_of,
)

SEEN = "_flatout_switched"
"""On what draws from a data set: which techniques were on for its latest batch."""
LATE = 2
"""Batches that may have left the workers before a switch, alongside those that wait."""
SCREEN_LOG = "screen-*.jsonl"
"""What a screen knows so far, line by line: a process that is killed leaves it."""
MAX_WORDS = 300


class OptimizerGroups:
    """Flags in the groups of optimizers that make steps meanwhile, to be put back as they were."""

    def __init__(
        self, optimizers: Sequence[Any], find_obstacle: Callable[[Any], str | None]
    ) -> None:
        """Choose the optimizers that can be switched.

        Raises:
            NotApplicable: if there are none; with the first one's reason.
        """
        obstacles = [find_obstacle(optimizer) for optimizer in optimizers]
        self.optimizers = [
            optimizer for optimizer, why in zip(optimizers, obstacles, strict=True) if why is None
        ]
        self.handles: list[Any] = []
        """Hooks to be taken off with the flags."""
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not self.optimizers:
            raise NotApplicable(next((why for why in obstacles if why), "no optimizer"))

    def turn(self, flags: Mapping[str, Any] | None) -> None:
        """Set flags in all groups, None to put back what was there before."""
        for group, before in self._before:
            group.update(before)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._before.clear()
        if flags is None:
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._before.append((group, {name: group.get(name) for name in flags}))
                group.update(flags)


class FetcherSwitches:
    """Techniques that are switched where samples are made: here, or in workers forked from here.

    They act at their hook points from the start, and are off until one is turned on: a byte of
    shared memory for each is looked at before a batch is made.
    """

    def __init__(self, session: Session, techniques: Mapping[str, Technique]) -> None:
        self.session = session
        self.techniques = {
            label: technique.bind()
            for label, technique in techniques.items()
            if is_switched_in_fetcher(technique)
        }
        """By label; those of the recipe that is screened act before them."""
        self.in_flight = 0
        """Batches that workers may have made ahead."""
        self._wanted = mmap.mmap(-1, max(1, len(self.techniques)))
        self._pid = os.getpid()
        session.techniques = (*session.techniques, *self.techniques.values())

    def install(self) -> None:
        """Follow the switches in every fetcher, and what each loader makes ahead."""
        from torch.utils.data import dataloader
        from torch.utils.data._utils import fetch

        patching.wrap(fetch._MapDatasetFetcher, "fetch", self._following)
        patching.wrap(dataloader.DataLoader, "_get_iterator", self._noting)

    def switch(self, label: str) -> Switch:
        """Return how a technique is switched; raises as its hook points did, or where it cannot."""
        technique = self.techniques[label]
        status, why = self.session.status.get(name_of(technique), ("", "no training loader"))
        if status == "failed":
            raise RuntimeError(why)
        if status != "applied":
            raise NotApplicable(why)
        loaders = [seen.asked for seen in self.session.loaders.values() if seen.is_training]
        if any(asked.get("start_method", "fork") != "fork" for asked in loaders):
            raise NotApplicable("only workers that are forked see a switch")
        number = [*self.techniques].index(label)
        return Switch(turn=lambda is_on: self._wanted.__setitem__(number, is_on))

    def _noting(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(make)
        def make_noted(loader: Any) -> Any:
            made_ahead = loader.num_workers * (loader.prefetch_factor or 0)
            self.in_flight = max(self.in_flight, made_ahead and made_ahead + LATE)
            return make(loader)

        return make_noted

    def _following(self, fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(fetch)
        def fetch_switched(fetcher: Any, indices: Any) -> Any:
            wanted = self._wanted[:]
            if fetcher.__dict__.get(SEEN) != wanted:
                fetcher.__dict__[SEEN] = wanted
                self._turn(fetcher, wanted)
            return fetch(fetcher, indices)

        return fetch_switched

    def _turn(self, fetcher: Any, wanted: bytes) -> None:
        """Switch this process; in a copy that proves a technique, off with what keeps samples.

        What is kept would be all that another technique is seen to make there.
        """
        from torch.utils.data import get_worker_info

        is_copy = os.getpid() != self._pid and get_worker_info() is None
        for technique, is_on in zip(self.techniques.values(), wanted, strict=False):
            if not is_copy:
                technique.turn_in_fetcher(fetcher, bool(is_on))
            elif technique.keeps_samples:
                technique.turn_in_fetcher(fetcher, False)  # noqa: FBT003


class SwitchBoard:
    """The techniques that can be switched in this process, and which of them are on."""

    def __init__(
        self,
        session: Session,
        techniques: Mapping[str, Technique],
        fetchers: FetcherSwitches | None = None,
    ) -> None:
        self.session = session
        self.techniques = techniques
        """By label."""
        self.fetchers = fetchers
        """Of those that are switched where samples are made."""
        self.switches: dict[str, Switch] = {}
        self.on: tuple[str, ...] = ()
        self.refused: dict[str, str] = {}
        """Techniques with nothing to act on, and why."""
        self.failed: dict[str, str] = {}
        """Techniques that raised while they were on or being switched, and what."""
        self.trouble: str = ""
        """What went wrong since the last switch while several were on; empty where nothing did."""
        self._calls: dict[tuple[int, tuple[str, ...]], Callable[..., Any]] = {}

    def begin(self) -> None:
        """Ask each technique for its switch; training calls and backward go through here now."""
        import torch

        session = self.session
        training = RunningTraining(roots=session.roots, optimizers=session.optimizers)
        for label, technique in self.techniques.items():
            if self.fetchers is not None and label in self.fetchers.techniques:
                ask = functools.partial(self.fetchers.switch, label)
            else:
                ask = functools.partial(technique.switch, training)
            switch = self._tried(label, ask)
            if switch is not None:
                self.switches[label] = switch
        for root in session.roots:
            call = session.training_calls[id(root)]
            session.training_calls[id(root)] = self._through_switches(root, call)
        patching.wrap(torch.autograd, "backward", self._backward, order=patching.Order.TECHNIQUE)

    def turn_to(self, wanted: Collection[str]) -> None:
        """Switch to a set of techniques; one that raises is off from now on, and noted."""
        self.trouble = ""
        for label in [x for x in self.on if x not in wanted]:
            self._turn(label, is_on=False)
        for label in [x for x in wanted if x not in self.on and x in self.switches]:
            self._turn(label, is_on=True)

    @property
    def in_flight(self) -> int:
        """Batches that were made before a switch of the data shows in one."""
        return self.fetchers.in_flight if self.fetchers is not None else 0

    def steps_until_seen(self, before: Collection[str]) -> int:
        """Return the steps before a switch shows in the batches, from what was on before."""
        of_data = self.fetchers.techniques if self.fetchers is not None else {}
        is_changed = not ({*before} ^ {*self.on}).isdisjoint(of_data)
        return self.in_flight if is_changed else 0

    def check(self) -> None:
        """Ask the techniques that are on whether they really act."""
        for label in self.on:
            self._tried(label, self.switches[label].check)

    def fail(self, label: str, why: str) -> None:
        """Switch a technique off for good."""
        self._give_up(label, self.failed, why)

    def refuse(self, label: str, why: str) -> None:
        """Switch a technique off for good that has nothing to act on."""
        self._give_up(label, self.refused, why)

    def _turn(self, label: str, *, is_on: bool) -> None:
        # In the order of the techniques: that is the order in which a recipe applies them.
        wanted = {*self.on, label} if is_on else {*self.on} - {label}
        self.on = tuple(x for x in self.techniques if x in wanted)
        self._tried(label, lambda: self.switches[label].turn(is_on))

    def _tried(self, label: str, act: Callable[[], Any]) -> Any:
        """Return what a technique does; one that raises is off for good, and the screen goes on."""
        try:
            return act()
        except NotApplicable as reason:
            self._give_up(label, self.refused, str(reason))
        except Exception as error:  # noqa: BLE001
            self._give_up(label, self.failed, _words(error))
        return None

    def _give_up(self, label: str, where: dict[str, str], why: str) -> None:
        where.setdefault(label, why)
        switch = self.switches.pop(label, None)
        if switch is not None and label in self.on:
            self.on = tuple(x for x in self.on if x != label)
            self.session.quietly(switch.turn)(False)  # noqa: FBT003

    def _through_switches(self, root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            key = id(root), self.on
            try:
                if key not in self._calls:
                    self._calls[key] = self._composed(root, call)
                return self._calls[key](*args, **kwargs)
            except Exception as error:  # noqa: BLE001  made again without the techniques
                self._saw_failure(error)
            return call(*args, **kwargs)

        return run

    def _composed(self, root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        for label in self.on:
            switch = self.switches[label]
            if switch.call is None:
                continue
            try:
                call = switch.call(call, root)
            except NotApplicable as reason:
                if len(self.session.roots) == 1:
                    self._give_up(label, self.refused, str(reason))
        return call

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return backward(*args, **kwargs)
            except Exception as error:
                if not (self.on and self.session.is_mine()):
                    raise
                self._saw_failure(error)
            return None

        return run

    def _saw_failure(self, error: Exception) -> None:
        """Switch everything off; who is to blame is found out where several were on."""
        import torch

        on, words = self.on, _words(error)
        if len(on) == 1:
            self._give_up(on[0], self.failed, words)
        else:
            self.turn_to(())
            self.trouble = words
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_WORDS]
