"""Beside a real training: the plan it is held against, and what comes after memory ran out."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import techniques
from flatout.core.errors import UserError
from flatout.core.input_files import parse_json, read_json
from flatout.core.recipe import Choice, Recipe
from flatout.core.technique import Numerics
from flatout.core.units import format_bytes
from flatout.hardware.machine import read_machine
from flatout.workflow.ranking import Search
from flatout.workflow.rescue import rungs_for, with_rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Levers of a plan that would fit."""

    choices: tuple[Choice, ...]
    saved_bytes: int
    time_ratio: float

    @property
    def label(self) -> str:
        """One line for people."""
        levers = " + ".join(choice.label for choice in self.choices)
        return f"{levers} (saves {format_bytes(self.saved_bytes)}, {self.time_ratio:.2f}x the time)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What `flatout plan --json` predicted, as far as a run needs it."""

    device: str
    bytes: Mapping[str, int]
    """At the peak of a steady step `allocated` and `reserved`, and the `workspace` in them."""
    fits: bool
    """Whether the script was said to fit as it is."""
    ways: tuple[Way, ...] = ()
    """What fits, the fastest first."""

    def for_child(self) -> dict[str, Any]:
        """Return what the training process compares itself with."""
        return {"device": self.device, **self.bytes}


def read_plan(path: Path) -> RunPlan:
    """Read the plan that `flatout plan --json` wrote.

    Raises:
        UserError: if there is none.
    """
    try:
        plain = read_json(path)
        return RunPlan(
            device=plain["device"],
            bytes={
                "allocated": int(plain["allocated"]["bytes"]),
                "reserved": int(plain["reserved"]["bytes"]),
                "workspace": int(plain["components"].get("workspace", {"bytes": 0})["bytes"]),
            },
            fits=bool(plain["fits"]),
            ways=tuple(_ways(plain.get("ladder", ()))),
        )
    except OSError as error:
        raise UserError(
            f"cannot read the plan {path}: {error.strerror}; 'flatout plan --json' writes one"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no plan ({type(error).__name__}: {error}); 'flatout plan --json' writes one"
        ) from None


def _ways(ladder: Sequence[Mapping[str, Any]]) -> Iterator[Way]:
    for rung in ladder:
        if not rung["fits"] or not rung["choices"] or rung.get("changes_training"):
            continue
        choices = tuple(choice_of(label) for label in rung["choices"])
        if all(map(_can_be_built, choices)):
            yield Way(
                choices=choices,
                saved_bytes=int(rung["saved_bytes"]),
                time_ratio=float(rung["time_ratio"]),
            )


def choice_of(label: str) -> Choice:
    """Return the choice that a label stands for.

    >>> choice_of("microbatching chunks=8").settings
    {'chunks': 8}
    """
    name, *settings = label.split()
    pairs = (setting.partition("=") for setting in settings)
    return Choice(technique=name, settings={key: _value(text) for key, _, text in pairs})


def _value(text: str) -> Any:
    """Return a setting as JSON would have it, else the text."""
    with contextlib.suppress(ValueError):
        return parse_json(text.lower() if text in ("True", "False") else text)
    return text


def _can_be_built(choice: Choice) -> bool:
    """Tell whether a label names a technique: a smaller batch is the script's business."""
    try:
        techniques.build(Recipe(choices=(choice,)))
    except UserError:
        return False
    return True


def next_recipes(recipe: Recipe, plan: RunPlan | None) -> Iterator[Recipe]:
    """Yield what to try after a recipe ran out of memory, each more saving than the one before.

    The plan's ways that fit come first; then flatout's own ladder, one lever on top of the other.
    """
    for way in plan.ways if plan else ():
        found = recipe
        for choice in way.choices:
            found = found.plus(choice)
        if found != recipe:
            yield found
    search = Search(machine=read_machine(torch=False), ceiling=Numerics.PRECISION)
    for choice in rungs_for(search):
        if choice not in recipe.choices:
            recipe = with_rung(recipe, choice)
            yield recipe


def tell(text: str) -> None:
    """Say something beside the script's own output."""
    sys.stderr.write(f"flatout: {text}\n")
    sys.stderr.flush()


def tell_exhaustion(where: str, plan: RunPlan | None, target: str) -> None:
    """Say where memory ran out, and what would have fit."""
    tell(f"out of memory {where}")
    if plan is None:
        tell(f"what would fit is not known: 'flatout plan {target}' says it")
    elif plan.fits:
        tell(
            f"by the plan it fits: {format_bytes(plan.bytes['reserved'])} reserved on "
            f"{plan.device}; is that a plan of this command, this batch and this device?"
        )
    elif not plan.ways:
        tell("the plan knows no lever with which it fits: take a smaller batch")
    else:
        tell("by the plan these would have fit: " + "; ".join(way.label for way in plan.ways[:3]))
