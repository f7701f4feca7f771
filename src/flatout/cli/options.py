"""What several commands share: the script with its arguments, and the types of options."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

MODULE = "-m"
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
MAX_WIDTH = 160
"""Wider lines are hard to read, however wide the terminal is."""


class ScriptCommand(click.Command):
    """A command whose last words are a script and that script's own arguments.

    Options of flatout come before the script. What follows the script's name is never parsed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["context_settings"] = {"allow_interspersed_args": False}
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with `-m` standing where a script may stand."""
        return super().parse_args(ctx, self._with_module_marked(args))

    def _with_module_marked(self, args: list[str]) -> list[str]:
        """Return the words with `--` before a leading `-m`: there flatout's own options end."""
        position = 0
        while position < len(args) and args[position].startswith("-"):
            if args[position] in (MODULE, "--"):
                return [*args[:position], "--", *args[position + (args[position] == "--") :]]
            position += 1 + self._takes_next(args[position])
        return args

    def _takes_next(self, word: str) -> bool:
        """Return whether an option's value is the word after it."""
        return any(
            word in option.opts and not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
        )


def seconds(_context: click.Context, _option: click.Parameter, text: str) -> float:
    """Return the seconds of a time such as `90s`, `10m` or `1h`; a mere number is seconds."""
    match = DURATION.fullmatch(text.strip().lower())
    value = float(match[1]) * UNITS_S[match[2] or "s"] if match else 0.0
    if value <= 0:
        raise click.BadParameter(f"{text!r} is not a time; write it as 90s, 10m or 1h")
    return value


def names(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    """Return the names of a list with commas between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def script(command: Callable[..., int]) -> Callable[..., int]:
    """Add the script and its arguments."""
    add_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    add_target = click.argument("target", metavar="SCRIPT")
    return add_target(add_arguments(command))


json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Write the result as JSON to this file too.",
)


language_option = click.option(
    "--lang",
    "language",
    type=click.Choice(["en", "ko"]),
    default="en",
    show_default=True,
    help="Language of the reports.",
)


def show(text: str, *, is_error: bool = False) -> None:
    """Write the text as far as the stream's encoding goes; what it lacks is escaped."""
    stream = sys.stderr if is_error else sys.stdout
    encoding = stream.encoding or "ascii"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False, err=is_error)


def terminal_width() -> int:
    """Return the columns of the terminal; 80 where the output goes elsewhere."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)
