"""What several commands share: the script with its arguments, and the types of options."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from flatout.cli import reader_language
from flatout.records.errors import UserError
from flatout.records.files import STDOUT
from flatout.records.messages import LANGUAGES, messages

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
PATH = click.Path(path_type=Path)
MODULE = "-m"
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
ANY_OPTIONS = re.compile(r"argv|parse_known_args|HfArgumentParser|CLI\(|hydra|\bfire\b")
"""In the source of a script whose options cannot be read from its text."""
JSON_ON_STDOUT = "flatout.json_on_stdout"
MAX_WIDTH = 160
"""Wider lines are hard to read, however wide the terminal is."""


def page(folder: str, name: str) -> str:
    """Return the page of a rule or a technique, from the wheel or from the clone."""
    import flatout

    package = Path(flatout.__file__).parent
    installed = package / "_docs"
    docs = installed if installed.is_dir() else package.parent.parent / "docs"
    return next((docs / folder).rglob(f"{name}.md")).read_text(encoding="utf-8")


class ScriptCommand(click.Command):
    """A command whose last words are a script and that script's own arguments.

    Options of flatout come before the script. What follows the script's name is never parsed.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with `-m` where a script may be; `--` says that the rest is the script's."""
        end = self._end_of_options(args)
        own, words = args[:end], args[end:]
        is_module = words[:1] == [MODULE]
        rest = super().parse_args(ctx, [*own, "--", *words] if is_module else args)
        if words[:1] != ["--"]:
            self._refuse_misplaced(ctx, own, words)
        return rest

    def _end_of_options(self, args: list[str]) -> int:
        """Return the place of the first word that is no option of flatout's, nor a value of one."""
        position = 0
        while position < len(args) and args[position].startswith("-"):
            if args[position] in (MODULE, "--"):
                break
            position += 1 + self._takes_next(args[position])
        return position

    def _refuse_misplaced(self, ctx: click.Context, own: list[str], words: list[str]) -> None:
        """Refuse an option of flatout's after a script that cannot have one of that name."""
        known = {name for option in self.params for name in option.opts if name.startswith("--")}
        for at, word in enumerate(words):
            name = word.partition("=")[0]
            if at == 0 or name not in known or _may_take(words, name):
                continue
            size = 1 + (self._takes_next(word) and at + 1 < len(words))
            moved, left = words[at : at + size], [*words[:at], *words[at + size :]]
            line = shlex.join([*own, *moved, *left])
            raise UserError(
                f"{name} is flatout's, and what follows the script goes to the script, which has "
                f"no such option; write: {ctx.command_path} {line} (if the "
                f"script does take {name}, put -- before the script)"
            )

    def _takes_next(self, word: str) -> bool:
        """Return whether an option's value is the word after it."""
        return any(
            word in option.opts and not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
        )


def _may_take(words: Sequence[str], name: str) -> bool:
    """Return whether a script may have an option of this name; unknown ones may."""
    from flatout.launch.workloads import parse_workload
    from flatout.tuning.script_files import PYTHON, files_of

    try:
        files = files_of(parse_workload(words[0], words[1:]))
    except UserError:
        return True  # said by the command
    source = "\n".join(
        text.decode("utf-8", "replace") for path, text in files if path.suffix in PYTHON
    )
    is_there = name.strip("-").replace("-", "_") in source.replace("-", "_")
    return is_there or ANY_OPTIONS.search(source) is not None


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


def _writable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written: better now than after the measurement."""
    if path is not None:
        from flatout.reporting.documents import ensure_file_writable

        ensure_file_writable(path)
    return path


def json_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Remember where standard output is the JSON's: `show` leaves the report out then."""
    context.meta[JSON_ON_STDOUT] = path == STDOUT
    return _writable(context, option, path)


def file_option(flag: str, help_text: str, name: str = "", **more: Any) -> Decorator:
    """Return the option for a file; its argument ends in `_path` if it has no other name."""
    return click.option(flag, name or f"{flag[2:]}_path", type=PATH, help=help_text, **more)


def output_option(flag: str, help_text: str, name: str = "") -> Decorator:
    """Return the option for a file that is written; one that cannot be is refused at once."""
    return file_option(flag, help_text, name, callback=_writable)


def recipe_option(help_text: str) -> Decorator:
    """Return the option for the recipe to run a script with."""
    return file_option("--with", help_text, "recipe_path")


json_option = file_option(
    "--json",
    "Write the result as JSON to this file too; - is standard output, without the report.",
    callback=json_file,
)


def out_option(default: str, help_text: str) -> Decorator:
    """Return the option for the folder of what is written."""
    return click.option(
        "--out", type=PATH, default=Path(default), show_default=True, help=help_text
    )


def time_option(flag: str, name: str, default: str, help_text: str) -> Decorator:
    """Return the option for a time, such as 90s, 10m or 1h, which is given in seconds."""
    return click.option(
        flag, name, default=default, callback=seconds, show_default=True, help=help_text
    )


quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress, only the result.")
language_option = click.option(
    "--lang",
    "language",
    type=click.Choice(LANGUAGES),
    default=reader_language,
    help="Language of what is said; else the locale's, if it is one of these.",
)
load_option = click.option(
    "--accept-load",
    "accepts_load",
    is_flag=True,
    help="Go on while others keep the machine busy.",
)


def show(text: str, *, is_error: bool = False) -> None:
    """Write the text as far as the stream's encoding goes; what it lacks is escaped.

    With `--json -` it is left out: standard output is the JSON's alone.
    """
    context = click.get_current_context(silent=True)
    if not is_error and context is not None and context.meta.get(JSON_ON_STDOUT):
        return
    stream = sys.stderr if is_error else sys.stdout
    encoding = stream.encoding or "ascii"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        _show_in_colour(text, is_error=is_error)
        return
    click.echo(text, nl=False, err=is_error)


def show_result(text: str, document: Mapping[str, Any], json_path: Path | None) -> None:
    """Show a report, and write its document where `--json` asks for it."""
    from flatout.reporting.documents import write_json

    show(text)  # first: should the disk be full, nothing is lost
    if json_path:
        write_json(document, json_path)


def _show_in_colour(text: str, *, is_error: bool) -> None:
    """Write a report to a terminal: the answer bold, verdicts and findings in colour."""
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    for pattern, style in _styles():
        for match in re.finditer(pattern, text, re.MULTILINE):
            shown.stylize(style, *match.span(1))
    Console(stderr=is_error, soft_wrap=True).print(shown, end="")


def _styles() -> list[tuple[str, str]]:
    """Return patterns whose first group has a style, in every language of the reports."""
    says = [messages(language) for language in LANGUAGES]

    def words(*names: str) -> str:
        return "|".join(re.escape(say(name)) for name in names for say in says)

    good = words("verdict.kept", "verdict.together", "verdict.confirmed")
    bad = words("verdict.rejected", "verdict.failed", "verdict.not_confirmed", "verdict.worse")
    return [
        (r"\A((?:.+\n)+)", "bold"),
        (r"^(-{10,})$", "dim"),
        (rf"^({words('label.finding')})  ", "bold yellow"),
        (rf"^(?:{words('label.next')}) +(.+)$", "bold cyan"),
        (rf"  ({good})$", "green"),
        (rf"  ({bad})$", "red"),
    ]


def terminal_width() -> int:
    """Return the columns of the terminal; 80 where the output goes elsewhere."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)
