"""Templates of the graphical reports, rendered by jinja2 with everything escaped."""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(name: str, values: Mapping[str, Any]) -> str:
    """Return a template filled with values; a value that is missing is an error."""
    return _environment().get_template(name).render(values)


def read_text(name: str) -> str:
    """Return a file alongside the templates as it is."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flatout.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
