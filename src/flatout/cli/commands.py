"""The group of commands. It reads their summaries in their files, so that `--help` imports none.

Plain click: `flatout --help` has to start in less than 0.2 s. Typer builds on a private copy of
click since 0.20-something, without a public way to a lazy group or to the parser's errors, and
brings pydantic along; it takes 1.5 times as long to import, too.
"""

import importlib
import re
from pathlib import Path

import click

from flatout import __version__
from flatout.records.errors import unknown

FIRST = (
    *("demo", "doctor", "measure", "check", "tune", "survey", "run", "patch", "plan", "roofline"),
    *("pack", "container", "watch", "compare", "restore", "techniques", "rules"),
)
"""The commands in the order of first use; one that is not named here comes after them."""
SUMMARY = re.compile(r'^@click\.command\("(\w+)".*?^    """([^"\n]*)', re.MULTILINE | re.DOTALL)
"""Finds a command's name, and the first line of its help."""


def _summaries() -> dict[str, str]:
    """Return what each command does; the file of each has its name."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = dict(pair for file in files for pair in SUMMARY.findall(file.read_text("utf-8")))
    return {name: found[name] for name in dict.fromkeys((*FIRST, *found))}


SUMMARIES = _summaries()


class Context(click.Context):
    """Writes help in the reader's language, which is its object."""

    def make_formatter(self) -> click.HelpFormatter:
        """Return what writes the help."""
        if self.obj in (None, "en"):
            return super().make_formatter()
        # Here: help in English has to start fast.
        from flatout.cli.help_text import TranslatedFormatter
        from flatout.records.messages import messages

        say = messages(self.obj)
        return TranslatedFormatter(say, width=self.terminal_width, max_width=self.max_content_width)


class Verbs(click.Group):
    """A group that imports a command's file when that command runs."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import one command."""
        if cmd_name not in SUMMARIES:
            raise click.UsageError(unknown("command", cmd_name, SUMMARIES), ctx)
        command: click.Command = importlib.import_module(f"flatout.cli.{cmd_name}").command
        command.context_class = Context
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="flatout %(version)s")
def flatout() -> None:
    """Your PyTorch training script, flat out, with proof.

    flatout's own options come before the script; everything after the script's name belongs to
    the script.
    """
