"""A Recipe: the chosen techniques with their settings, and where they go in the workload."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.records.input_files import parse_json
from flatout.records.parallel import ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One technique, chosen."""

    technique: str
    """Its name, equal to its file name."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """One line for people.

        >>> Choice(technique="cpu_threads", settings={"threads": 2}).label
        'cpu_threads threads=2'
        """
        return " ".join([self.technique, *(f"{k}={v}" for k, v in self.settings.items())])

    @staticmethod
    def from_label(label: str) -> "Choice":
        """Return the choice that has this label.

        >>> Choice.from_label("microbatching chunks=8").settings
        {'chunks': 8}
        """
        name, *settings = label.split()
        pairs = (setting.partition("=") for setting in settings)
        return Choice(technique=name, settings={key: _value_of(text) for key, _, text in pairs})


def _value_of(text: str) -> Any:
    """Return a setting as JSON would have it, else the text."""
    with contextlib.suppress(ValueError):
        return parse_json(text.lower() if text in ("True", "False") else text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A declarative set of techniques."""

    choices: tuple[Choice, ...] = ()
    training_loaders: tuple[str, ...] = ()
    """Addresses of the loaders that the loader techniques apply to; empty means every loader."""
    parallel: ParallelSpec | None = None
    """How the training is spread over ranks; None leaves it as it is."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: script, torch, machine, ratio. For people; nothing depends on it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the techniques, in order."""
        return tuple(choice.technique for choice in self.choices)

    @property
    def label(self) -> str:
        """One line for people; `baseline` when empty."""
        return " + ".join(choice.label for choice in self.choices) or "baseline"

    @property
    def num_ranks(self) -> int:
        """Processes that train together; 1 where no technique spreads the training."""
        spread = (c.settings["ranks"] for c in self.choices if "ranks" in c.settings)
        return int(next(spread, 1))

    def plus(self, *choices: Choice) -> "Recipe":
        """Return the recipe with these choices too; each replaces one of its technique."""
        found = self
        for choice in choices:
            found = replace(found, choices=(*found.without(choice.technique).choices, choice))
        return found

    def without(self, technique: str) -> "Recipe":
        """Return the recipe with one technique left out."""
        kept = tuple(choice for choice in self.choices if choice.technique != technique)
        return replace(self, choices=kept)
