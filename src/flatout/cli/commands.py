"""The group of commands. It knows their summaries, so that `--help` imports none of them.

Plain click: `flatout --help` has to start in less than 0.2 s. Typer builds on a private copy of
click since 0.20-something, without a public way to a lazy group or to the parser's errors, and
brings pydantic along; it takes 1.5 times as long to import, too.
"""

import importlib

import click

from flatout import __version__
from flatout.records.errors import unknown

SUMMARIES = {
    "demo": "Make a starved training job from photographs, tune it, show the table.",
    "doctor": "Check everything around a training that decides how fast it runs.",
    "measure": "Show where the time and the memory of a training step go.",
    "check": "Find what makes trainings slow, large or wrong in their source.",
    "tune": "Try what would help, keep what measurably does, prove it.",
    "survey": "Show what each known method does to speed and memory here.",
    "run": "Train with a recipe: the real training, the unmodified script.",
    "patch": "Write a recipe as a diff of the script.",
    "plan": "Say whether a training step fits a GPU that you do not have.",
    "roofline": "Show peak throughput, and how close each matrix product gets.",
    "pack": "Put a data set into a fast, shuffled, resumable format.",
    "container": "Write a Dockerfile with the stack that was measured.",
    "watch": "Show a running job, the GPUs and the host, live.",
    "compare": "Compare two results that --json wrote.",
    "restore": "Put back what a killed trial had moved aside in a folder.",
    "techniques": "List the techniques and what each may do to the numbers.",
    "rules": "List the rules, or print the page of one.",
}
"""The commands in the order of first use; the file of each has the same name and summary."""


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
