"""A recipe by hand: what to change in the script to have the same without flatout.

These are instructions, not a diff of the user's source: flatout has not read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from string import Template
from typing import Any

from flatout.core.recipe import Recipe
from flatout.core.technique import Technique


@dataclass(frozen=True, slots=True, kw_only=True)
class HandChange:
    """What one technique of a recipe changes in a script."""

    label: str
    """The technique with its settings."""
    lines: tuple[str, ...]
    """Lines that start with `- ` are taken out, with `+ ` put in; others are plain words. Empty
    when nothing is known."""


def hand_changes(
    recipe: Recipe, technique_class: Callable[[str], type[Technique]]
) -> tuple[HandChange, ...]:
    """Return the changes of a recipe, in its order.

    Args:
        recipe: The chosen techniques.
        technique_class: Finds the class of a technique by its name.
    """
    return tuple(
        HandChange(
            label=choice.label,
            lines=_filled(technique_class(choice.technique).by_hand, dict(choice.settings)),
        )
        for choice in recipe.choices
    )


def _filled(text: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Put the settings in for `$name`; a name that is no setting stays as it stands."""
    values = {name: _source(value) for name, value in settings.items()}
    return tuple(Template(text.strip("\n")).safe_substitute(values).splitlines())


def _source(value: Any) -> str:
    """Return a setting as it stands in a script; texts go without quotes, the lines have them."""
    return value if isinstance(value, str) else repr(value)
