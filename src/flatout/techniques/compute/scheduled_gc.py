"""Collect garbage every so many steps instead of whenever Python counts enough new objects.

What it does: once the first step is made, freezes what exists (model, data set, modules: nothing of
it will ever be garbage), switches the automatic collection off, and collects every `every` steps.
When it helps: a data set or a tokenizer of millions of Python objects, which each full collection
walks through; many processes that wait for the one that collects.
What it costs: reference cycles live for up to `every` steps, with the tensors in them.
How it is checked: bit by bit: it touches no number.
"""

import atexit
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, RunningTraining, Switch, Technique

MIN_SHARE = 0.005
"""Share of the step in the collector from which the technique is offered: a quarter of what shows.
"""
EVERY = 100
"""Steps between two collections: an assumption; large trainings use 50 to 1000."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGc(Technique):
    """Collect garbage on a schedule."""

    family: ClassVar[str] = "compute"
    addresses: ClassVar[frozenset[str]] = frozenset(
        {"data_wait", "forward", "backward", "optimizer", "other"}
    )
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
After the first step:
+ gc.collect()
+ gc.freeze()
+ gc.disable()
And in the loop:
+ if step % $every == 0:
+     gc.collect()
"""

    every: int = EVERY
    """Steps between two collections."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ScheduledGc"]:
        """Return the technique where the collector takes a visible part of the step."""
        del machine
        share = profile.collection_ms_per_step / (profile.step_ms.median or 1.0)
        return [cls()] if share >= MIN_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the collector's time to be gone; a hundredth of it stays at most."""
        del machine
        collection_ms = min(profile.collection_ms_per_step, 0.9 * profile.step_ms.median)
        return Effect(
            step_ms=-collection_ms * (1 - 1 / self.every),
            why=f"the collector takes {collection_ms:.2f} ms of each step",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Count its steps: begin once the first optimizer has made its first one."""
        if not _SCHEDULE:
            if not gc.isenabled():
                raise NotApplicable("the script switched the automatic collection off itself")
            _SCHEDULE.append(collect_every(self.every))
        optimizer.register_step_post_hook(_tick)
        return optimizer

    def switch(self, training: RunningTraining) -> Switch:
        """Freeze what exists and end the automatic collection, or leave it to Python.

        Blocks are shorter than the time between two collections of the schedule: none is made.
        """
        if not gc.isenabled():
            raise NotApplicable("the script switched the automatic collection off itself")
        del training

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            if is_on:
                gc.collect()
                gc.freeze()
                gc.disable()
            else:
                gc.unfreeze()
                gc.enable()

        return Switch(turn=turn, comes_rarely=True)

    def end(self) -> str:
        """Leave the collection to Python again."""
        if _SCHEDULE:
            _SCHEDULE.clear()
            _OFF.clear()
            gc.unfreeze()
            gc.enable()
        return ""


_SCHEDULE: list[Callable[[], None]] = []
"""What counts the steps of this process."""
_OFF: list[int] = []
"""The process whose automatic collection a schedule switched off."""


def _tick(*_: Any) -> None:
    """Count a step; none once the technique has ended."""
    for tick in _SCHEDULE:
        tick()


def _begin_again() -> None:
    """Leave the collection of a forked child to Python: a loader's worker makes no steps."""
    _SCHEDULE.clear()
    if _OFF:
        _OFF.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def collect_every(steps: int) -> Callable[[], None]:
    """Return what to call after each step.

    The first call freezes what exists and ends the automatic collection.
    """
    made = 0

    def tick() -> None:
        nonlocal made
        made += 1
        if made == 1:
            gc.collect()
            gc.freeze()
            gc.disable()
            _OFF.append(os.getpid())
            # What stays frozen is never taken down: at the end of the process libraries then
            # report it as leaked, line by line, in the script's output.
            atexit.register(gc.unfreeze)
        elif made % steps == 0:
            gc.collect()

    return tick
