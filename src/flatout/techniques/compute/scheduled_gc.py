"""Collect garbage every so many steps instead of whenever Python counts enough new objects.

What it does: once the first step is made, freezes what exists (model, data set, modules: nothing of
it will ever be garbage), switches the automatic collection off, and collects every `every` steps.
When it helps: a data set or a tokenizer of millions of Python objects, which each full collection
walks through; many processes that wait for the one that collects.
What it costs: reference cycles live for up to `every` steps, with the tensors in them.
How it is checked: bit by bit: it touches no number.
"""

import atexit
import functools
import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    Switch,
    Technique,
    process_state,
)

MIN_SHARE = 0.005
"""Share of the step in the collector from which the technique is offered: a quarter of what shows.
"""
EVERY = 100
"""Steps between two collections: an assumption; large trainings use 50 to 1000."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGc(Technique):
    """Collect garbage on a schedule."""

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
    schedules: "list[CollectionSchedule]" = process_state(list)
    """That of this process, once an optimizer made its first step."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ScheduledGc"]:
        """Return the technique where the collector takes a visible part of the step."""
        return [cls()] if felt_ms(profile) >= MIN_SHARE * profile.step_ms.median > 0 else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the collector's time to be gone; a hundredth of it stays at most."""
        collection_ms = felt_ms(profile)
        return Effect(
            step_ms=-collection_ms * (1 - 1 / self.every),
            why=f"the collector takes {collection_ms:.2f} ms of each step",
        )

    def optimizer(self, optimizer: Any) -> Any:
        """Count its steps: begin once the first optimizer has made its first one."""
        if not self.schedules:
            if not gc.isenabled():
                raise NotApplicable("the script switched the automatic collection off itself")
            self.schedules.append(CollectionSchedule(self.every))
        optimizer.register_step_post_hook(self.schedules[0].tick)
        return optimizer

    def switch(self, training: RunningTraining) -> Switch:
        """Freeze what exists and end the automatic collection, or leave it to Python.

        Blocks are shorter than the time between two collections of the schedule: none is made.
        """
        if not gc.isenabled():
            raise NotApplicable("the script switched the automatic collection off itself")

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
        for schedule in self.schedules:
            schedule.end()
        return ""


def felt_ms(profile: Profile) -> float:
    """Return the collector's time that a step may wait for: on a GPU that waits for launches.

    Where the host is ahead of it, what it collects meanwhile delays nothing.
    """
    waits = profile.regime.shares.get("launch", 0.9) if profile.regime else 0.9
    return min(profile.collection_ms_per_step, min(waits, 0.9) * profile.step_ms.median)


class CollectionSchedule:
    """Collects every so many steps of this process, once the first one was made.

    A forked child, such as a loader's worker, makes no steps: there Python collects as ever.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.made = 0
        self.is_off = False
        """Whether it switched the automatic collection off."""
        if hasattr(os, "register_at_fork"):
            # What is registered stays for ever: it must not keep the schedule.
            os.register_at_fork(after_in_child=functools.partial(_end_in_child, weakref.ref(self)))

    def tick(self, *_: Any) -> None:
        """Count a step; the first one freezes what exists and ends the automatic collection."""
        self.made += 1
        if self.made == 1:
            gc.collect()
            gc.freeze()
            gc.disable()
            self.is_off = True
            # What stays frozen is never taken down: at the end of the process libraries then
            # report it as leaked, line by line, in the script's output.
            atexit.register(gc.unfreeze)
        elif self.is_off and self.made % self.every == 0:
            gc.collect()

    def end(self, *, thaws: bool = True) -> None:
        """Leave the collection to Python again; no step counts any more."""
        self.made = max(1, self.made)
        if self.is_off:
            self.is_off = False
            gc.enable()
            if thaws:
                gc.unfreeze()


def _end_in_child(reference: "weakref.ref[CollectionSchedule]") -> None:
    schedule = reference()
    if schedule is not None:
        schedule.end(thaws=False)  # what a forked child's collector looks at, it copies


KOREAN = """
Collect garbage on a schedule.
    가비지 컬렉션을 정해진 스텝마다 합니다.
After the first step:
    첫 스텝 뒤에:
And in the loop:
    그리고 루프 안에서:
the collector takes {ms} ms of each step
    가비지 컬렉터가 스텝마다 {ms} ms를 씁니다
the script switched the automatic collection off itself
    스크립트가 자동 컬렉션을 직접 껐습니다
"""
